package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// comparePeek fails if Peek and the reference disagree about body.
func comparePeek(t *testing.T, api API, body []byte) {
	t.Helper()
	before := bytes.Clone(body)
	var r Request
	err := Peek(api, body, &r)
	if !bytes.Equal(before, body) {
		t.Fatalf("Peek changed the body")
	}
	want, ok := refPeek(api, body)
	if ok != (err == nil) {
		t.Fatalf("%v: Peek says %v; reference accepts: %v\n%q", api, err, ok, body)
	}
	if err != nil {
		var be *BodyError
		if !errors.As(err, &be) || be.Message == "" || be.Offset < 0 || be.Offset > len(body) {
			t.Fatalf("not a helpful error: %#v", err)
		}
		return
	}
	str := func(name string, got []byte) {
		t.Helper()
		if string(got) != want.strings[name] {
			t.Fatalf("%v: %s is %q; reference has %q\n%q", api, name, got, want.strings[name], body)
		}
	}
	rng := func(name string, got Range) {
		t.Helper()
		if string(got.Of(body)) != want.raw[name] {
			t.Fatalf("%v: range of %s is %q; reference has %q\n%q", api, name, got.Of(body), want.raw[name], body)
		}
	}
	num := func(name string, got, want int) {
		t.Helper()
		if got != want {
			t.Fatalf("%v: %s is %d; reference has %d\n%q", api, name, got, want, body)
		}
	}
	boolean := func(name string, got bool) {
		t.Helper()
		if got != want.bools[name] {
			t.Fatalf("%v: %s is %v; reference has %v\n%q", api, name, got, want.bools[name], body)
		}
	}
	str("model", r.Model)
	rng("model", r.ModelRange)
	boolean("stream", r.Stream)
	rng("stream", r.StreamRange)
	limit, has := want.ints["max_completion_tokens"]
	if !has {
		limit, has = want.ints["max_tokens"]
	}
	if !has {
		limit, has = want.ints["max_output_tokens"]
	}
	if r.HasMaxTokens != has {
		t.Fatalf("HasMaxTokens is %v\n%q", r.HasMaxTokens, body)
	}
	num("max tokens", r.MaxTokens, limit)
	num("n", r.N, want.ints["n"])
	num("best_of", r.BestOf, want.ints["best_of"])
	num("priority", r.Priority, want.ints["priority"])
	str("cache_salt", r.CacheSalt)
	str("extra_key", r.ExtraKey)
	str("prompt_cache_key", r.PromptCacheKey)
	str("previous_response_id", r.PreviousResponseID)
	session := want.strings["session_id"]
	if session == "" {
		session = want.strings["session_params"]
	}
	if string(r.SessionID) != session {
		t.Fatalf("session is %q; reference has %q\n%q", r.SessionID, session, body)
	}
	if user := want.strings["user"] + want.strings["metadata"]; string(r.User) != user {
		t.Fatalf("user is %q; reference has %q\n%q", r.User, user, body)
	}
	rng("stream_options", r.StreamOptionsRange)
	boolean("include_usage", r.IncludeUsage)
	boolean("background", r.Background)
	boolean("store", r.Store)
	var got []string
	for _, g := range r.Prompts() {
		got = append(got, string(g.Of(body)))
	}
	if !slices.Equal(got, want.prompts) {
		t.Fatalf("%v: prompt is %q; reference has %q\n%q", api, got, want.prompts, body)
	}
}

// bodies yields the files under testdata/bodies: requests as clients send them,
// and hostile ones.
func bodies(tb testing.TB) map[string][]byte {
	tb.Helper()
	names, err := filepath.Glob("testdata/bodies/*")
	if err != nil || len(names) == 0 {
		tb.Fatalf("testdata/bodies: %v, %d files", err, len(names))
	}
	m := map[string][]byte{}
	for _, n := range names {
		b, err := os.ReadFile(n)
		if err != nil {
			tb.Fatal(err)
		}
		m[filepath.Base(n)] = b
	}
	return m
}

var jsonAPIs = []API{ChatCompletions, Completions, Embeddings, Responses, Messages, CountTokens, Rerank, Score, Pooling, Classify, Tokenize, Detokenize}

// home returns the API that a file of testdata/bodies was written for.
func home(name string) API {
	for _, api := range jsonAPIs {
		if strings.HasPrefix(name, api.String()) {
			return api
		}
	}
	return ChatCompletions
}

func TestPeekAgreesWithEncodingJSON(t *testing.T) {
	for name, body := range bodies(t) {
		for _, api := range jsonAPIs {
			t.Run(name+"/"+api.String(), func(t *testing.T) {
				comparePeek(t, api, body)
				// Every truncation, and a stray byte at every place.
				if api != home(name) || len(body) > 2048 {
					return
				}
				every := stride
				if len(body) > 1000 { // repetitive, and slow to read by tokens
					every = 7 * stride
				}
				for i := 0; i < len(body); i += every {
					comparePeek(t, api, body[:i:i])
					for _, c := range []byte("\"\\{}[],:0n \x00\xff") {
						m := bytes.Clone(body)
						m[i] = c
						comparePeek(t, api, m)
					}
				}
			})
		}
	}
}

func TestPeekFields(t *testing.T) {
	var r Request
	peek := func(api API, body string) {
		t.Helper()
		if err := Peek(api, []byte(body), &r); err != nil {
			t.Fatalf("%s: %v", body, err)
		}
	}
	prompt := func(body string, want ...string) {
		t.Helper()
		var got []string
		for _, g := range r.Prompts() {
			got = append(got, body[g.Start:g.End])
		}
		if !slices.Equal(got, want) {
			t.Fatalf("prompt is %q; want %q", got, want)
		}
	}

	body := `{"messages":[{"role":"user","content":"{\"model\":\"no\"}"}],"tools":[1],"model":"org/Model:v1@x","n":3,"stream":true,` +
		`"max_tokens":5,"max_completion_tokens":1e2,"stream_options":{"include_usage":true},"Model":"other"}`
	peek(ChatCompletions, body)
	prompt(body, `[1]`, `[{"role":"user","content":"{\"model\":\"no\"}"}]`)
	if string(r.Model) != "org/Model:v1@x" || body[r.ModelRange.Start:r.ModelRange.End] != `"org/Model:v1@x"` {
		t.Errorf("model %q at %v", r.Model, r.ModelRange)
	}
	if !r.Stream || r.MaxTokens != 100 || r.Choices() != 3 || !r.IncludeUsage {
		t.Errorf("%+v", r.Facts)
	}
	if r.PromptBytes() != 3+len(`[{"role":"user","content":"{\"model\":\"no\"}"}]`) {
		t.Errorf("prompt bytes %d", r.PromptBytes())
	}

	// Reuse forgets everything.
	body = `{"mod\u0065l":"\u00e9\ud83d\ude00\ud800","prompt":[[1,2],[3]],"best_of":4,"n":2}`
	peek(Completions, body)
	if string(r.Model) != "é😀\ufffd" || r.Stream || r.HasMaxTokens || r.IncludeUsage {
		t.Errorf("%+v", r.Facts)
	}
	if r.Choices() != 4 || !r.PromptIsTokens || r.PromptTokens != 3 {
		t.Errorf("%+v", r.Facts)
	}
	prompt(body, `[[1,2],[3]]`)

	peek(Completions, `{"model":"m","prompt":["1,2",3]}`)
	if r.PromptIsTokens || r.PromptTokens != 0 {
		t.Errorf("text is taken for token ids")
	}
	peek(Detokenize, `{"tokens":[ 1 , 2 ]}`)
	if !r.PromptIsTokens || r.PromptTokens != 2 || r.Model != nil {
		t.Errorf("%+v", r.Facts)
	}

	body = `{"messages":[],"system":"s","tools":[],"model":"m","max_tokens":7,"metadata":{"user_id":"u1","a":{"user_id":"no"}}}`
	peek(Messages, body)
	prompt(body, `[]`, `"s"`, `[]`)
	if string(r.User) != "u1" || r.MaxTokens != 7 {
		t.Errorf("%+v", r.Facts)
	}

	body = `{"input":"i","instructions":"do","model":"m","previous_response_id":"resp_1","store":false,"background":true,"max_output_tokens":0,"user":null}`
	peek(Responses, body)
	prompt(body, `"do"`, `"i"`)
	if string(r.PreviousResponseID) != "resp_1" || !r.HasStore || r.Store || !r.Background || !r.HasMaxTokens || r.MaxTokens != 0 {
		t.Errorf("%+v", r.Facts)
	}

	// Some servers take a list of salts; another list is another cache.
	peek(Completions, `{"model":"m","cache_salt":["a","b"],"priority":-3,"session_id":"s","session_params":{"id":"t"}}`)
	if string(r.CacheSalt) != `["a","b"]` || !r.HasPriority || r.Priority != -3 || string(r.SessionID) != "s" {
		t.Errorf("%+v", r.Facts)
	}
}

func TestPeekRefuses(t *testing.T) {
	f := func(api API, body, field string, offset int, message string) {
		t.Helper()
		var r Request
		err := Peek(api, []byte(body), &r)
		var be *BodyError
		if !errors.As(err, &be) {
			t.Errorf("%.80q: no error; want %s", body, message)
			return
		}
		if be.Field != field || be.Offset != offset || !strings.Contains(be.Message, message) {
			t.Errorf("%.80q:\n got %q %d %q\nwant %q %d %q", body, be.Field, be.Offset, be.Message, field, offset, message)
		}
	}
	// not an object
	f(ChatCompletions, ``, "", 0, "the body is empty")
	f(ChatCompletions, ` `, "", 1, "only white space")
	f(ChatCompletions, `null`, "", 0, "the body is null; send a JSON object")
	f(ChatCompletions, `[]`, "", 0, "the body is an array")
	f(ChatCompletions, "\xef\xbb\xbf{}", "", 0, "byte order mark")
	f(ChatCompletions, `model=x`, "", 0, "no JSON value")
	// syntax
	f(ChatCompletions, `{"model":"m"`, "", 12, "ends in the middle")
	f(ChatCompletions, `{"model":"m`, "", 11, "ends inside a string")
	f(ChatCompletions, `{"model":"m"}{}`, "", 13, "follows the JSON object at byte 13")
	f(ChatCompletions, `{"model":"m",}`, "", 13, "a comma before the closing bracket")
	f(ChatCompletions, `{"model":"m","a":{"b":1 , }}`, "", 26, "a comma before the closing bracket")
	f(ChatCompletions, `{"model":"m","a":[1,]}`, "", 20, "a comma before the closing bracket")
	f(ChatCompletions, `{"model":"m","a":]}`, "", 17, "no JSON value")
	f(ChatCompletions, `{"model":"m",a:1}`, "", 13, "where a key belongs")
	f(ChatCompletions, `{"model":"m","a":[1}`, "", 19, "closing bracket that fits")
	f(ChatCompletions, `{"model":"m","a":{"b":1]`, "", 23, "closing bracket that fits")
	f(ChatCompletions, "{\"model\":\"m\",\"a\":\"\n\"}", "", 18, "control character")
	f(ChatCompletions, `{"model":"m","a":"\x"}`, "", 18, "invalid escape")
	f(ChatCompletions, `{"model":"m","a":"\u12g4"}`, "", 18, "invalid escape")
	f(ChatCompletions, "{\"model\":\"m\",\"a\":\"ab\xff\"}", "", 20, "invalid UTF-8")
	f(ChatCompletions, "{\"model\":\"m\",\"a\":\"\xed\xa0\x80\"}", "", 18, "invalid UTF-8") // a surrogate in UTF-8
	f(ChatCompletions, `{"model":"m","a":01}`, "", 18, "something else after a value")
	f(ChatCompletions, `{"model":"m","a":1.}`, "", 19, "invalid number")
	f(ChatCompletions, `{"model":"m","a":nul}`, "", 17, "invalid literal")
	f(ChatCompletions, `{"model":"m","a":NaN}`, "", 17, "no JSON value")
	f(ChatCompletions, `{"model":"m","a" 1}`, "", 17, "want ':'")
	deep := strings.Repeat("[", 511) + strings.Repeat("]", 511)
	f(ChatCompletions, `{"model":"m","a":`+deep+`}`, "", 17+510, "more than 511 nested")
	// model
	f(ChatCompletions, `{}`, "model", 1, "model is missing")
	f(ChatCompletions, `{"Model":"m"}`, "model", 12, "model is missing")
	f(ChatCompletions, `{"model":null}`, "model", 9, "model at byte 9: is null; want a string")
	f(ChatCompletions, `{"model":5}`, "model", 9, "is a number; want a string")
	f(ChatCompletions, `{"model":["m"]}`, "model", 9, "is an array; want a string")
	f(ChatCompletions, `{"model":""}`, "model", 9, "is empty")
	f(Tokenize, `{"model":""}`, "model", 9, "is empty")
	// duplicates
	f(ChatCompletions, `{"model":"a","model":"b"}`, "model", 13, `"model" is there twice, again at byte 13`)
	f(ChatCompletions, `{"model":"a","mod\u0065l":"a"}`, "model", 13, "there twice")
	f(ChatCompletions, `{"model":"a","x":1,"\u0078":1}`, "x", 19, "there twice")
	f(ChatCompletions, `{"model":"a","\u0078":1,"x":1}`, "x", 24, "there twice")
	f(ChatCompletions, `{"model":"a","top_p":1,"n":1,"top_p":1}`, "top_p", 29, "there twice")
	f(Embeddings, `{"model":"a","n":1,"n":1}`, "n", 19, "there twice") // not read by this API
	f(ChatCompletions, `{"model":"a","":1,"":2}`, "", 18, `"" is there twice`)
	// types
	f(ChatCompletions, `{"model":"m","stream":"true"}`, "stream", 22, "is a string; want true or false")
	f(ChatCompletions, `{"model":"m","stream":1}`, "stream", 22, "is a number; want true or false")
	f(ChatCompletions, `{"model":"m","max_tokens":-1}`, "max_tokens", 26, "want an integer from 0 to 2147483647")
	f(ChatCompletions, `{"model":"m","max_tokens":1e30}`, "max_tokens", 26, "out of bounds")
	f(ChatCompletions, `{"model":"m","max_tokens":1e999}`, "max_tokens", 26, "out of bounds")
	f(ChatCompletions, `{"model":"m","max_tokens":1.5}`, "max_tokens", 26, "not a whole number")
	f(ChatCompletions, `{"model":"m","max_tokens":"5"}`, "max_tokens", 26, "is a string; want an integer")
	f(ChatCompletions, `{"model":"m","max_tokens":99999999999999999999999}`, "max_tokens", 26, "out of bounds")
	f(ChatCompletions, `{"model":"m","n":true}`, "n", 17, "is a boolean; want an integer")
	f(Responses, `{"model":"m","max_output_tokens":{}}`, "max_output_tokens", 33, "is an object; want an integer")
	f(Responses, `{"model":"m","previous_response_id":7}`, "previous_response_id", 36, "want a string")
	f(ChatCompletions, `{"model":"m","stream_options":true}`, "stream_options", 30, "want an object")
	f(ChatCompletions, `{"model":"m","stream_options":{"include_usage":1}}`, "stream_options.include_usage", 47, "want true or false")

	var r Request
	for _, api := range jsonAPIs {
		err := Peek(api, []byte(`{}`), &r)
		if want := !api.ModelOptional(); errors.Is(err, ErrModelMissing) != want {
			t.Errorf("%v without a model: %v", api, err)
		}
	}
	if err := Peek(ChatCompletions, []byte(`{"model":5}`), &r); errors.Is(err, ErrModelMissing) {
		t.Error("a wrong model is not a missing one")
	}
	// One less than too deep.
	if err := Peek(ChatCompletions, []byte(`{"model":"m","a":`+deep[1:len(deep)-1]+`}`), &r); err != nil {
		t.Error(err)
	}
}

func TestPeekManyKeys(t *testing.T) {
	body := func(n int, last string) []byte {
		var b bytes.Buffer
		b.WriteString(`{"model":"m"`)
		for i := range n {
			fmt.Fprintf(&b, `,"k%d":%d`, i, i)
		}
		fmt.Fprintf(&b, "%s}", last)
		return b.Bytes()
	}
	var r Request
	for _, n := range []int{63, 64, 65, 500, 1024} {
		if err := Peek(ChatCompletions, body(n, ""), &r); err != nil {
			t.Errorf("%d keys: %v", n, err)
		}
		for _, dup := range []string{"k0", "k62", fmt.Sprintf("k%d", n-1), `\u006b7`} {
			err := Peek(ChatCompletions, body(n, `,"`+dup+`":0`), &r)
			if err == nil || !strings.Contains(err.Error(), "there twice") {
				t.Errorf("%d keys and %s again: %v", n, dup, err)
			}
		}
	}
	if err := Peek(ChatCompletions, body(1025, ""), &r); err == nil || !strings.Contains(err.Error(), "more than 1024 keys") {
		t.Errorf("1025 keys: %v", err)
	}
	r.Reset()
	if cap(r.more) > keepKeys {
		t.Errorf("Reset keeps %d keys", cap(r.more))
	}
}

func FuzzPeek(f *testing.F) {
	for _, b := range bodies(f) {
		for _, api := range jsonAPIs {
			f.Add(uint8(api), b)
		}
	}
	f.Fuzz(func(t *testing.T, api uint8, body []byte) {
		comparePeek(t, jsonAPIs[int(api)%len(jsonAPIs)], body)
	})
}

// Texts that prompts are made of: prose has an escape in some hundred bytes, code
// one in twenty-five.
const (
	prose = "The table is published as one immutable value, so that a reader never sees two scrapes in one decision. A burst between two " +
		"scrapes spreads, because a choice books what it takes; what others have sent is as old as the scrape, and no older. Rates and lengths " +
		"are learned from what passes, with priors for each kind of server, and being wrong by a third costs next to nothing.\n\n"
	code = "The table is published as one immutable value, so that readers never see two scrapes in one decision.\n" +
		"func (t *Table) Load() *Snapshot {\n\treturn t.cur.Load()\n}\nHe said: \"measure it\", and we did; the difference was 3 %.\n"
)

// chatBody returns a chat body of about size bytes, a system prompt and some turns
// made of text.
func chatBody(text string, size int) []byte {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	body := struct {
		Model       string    `json:"model"`
		Messages    []message `json:"messages"`
		Temperature float64   `json:"temperature"`
		MaxTokens   int       `json:"max_tokens"`
		Stream      bool      `json:"stream"`
		TopP        float64   `json:"top_p"`
	}{"meta-llama/Llama-3.3-70B-Instruct", []message{{"system", "You are a helpful assistant."}}, 0.7, 512, true, 0.95}
	for n := 200; n < size; {
		t := strings.Repeat(text, 1+size/6/len(text))
		t = t[:min(len(t), max(size-n-60, 1))]
		body.Messages = append(body.Messages, message{"user", t})
		n += len(t) + strings.Count(t, "\n") + 40
	}
	b, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return b
}

func BenchmarkPeek(b *testing.B) {
	chinese := strings.Repeat("这个表作为一个不可变的值发布，所以读者不会看到两次抓取。", 8)
	for _, text := range []struct{ name, text string }{{"prose", prose}, {"code", code}, {"chinese", chinese}} {
		for _, size := range []int{1 << 10, 16 << 10, 256 << 10, 2 << 20} {
			body := chatBody(text.text, size)
			b.Run(fmt.Sprintf("%s/%dKB/peek", text.name, size>>10), func(b *testing.B) {
				var r Request
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				reportCPU(b, func() {
					if err := Peek(ChatCompletions, body, &r); err != nil {
						b.Fatal(err)
					}
				})
			})
			b.Run(fmt.Sprintf("%s/%dKB/json.Valid", text.name, size>>10), func(b *testing.B) {
				b.SetBytes(int64(len(body)))
				reportCPU(b, func() {
					if !json.Valid(body) {
						b.Fatal("invalid")
					}
				})
			})
		}
	}
}
