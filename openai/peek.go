package openai

import (
	"bytes"
	"hash/maphash"
	"math"
	"strconv"
)

// A field is a top-level key that Peek knows. The order of the prompt fields is
// the order in which chat templates write them (tools, documents, system text,
// conversation), and so the order of Facts.Prompt.
type field uint8

const (
	fNone field = iota

	fTools
	fFunctions
	fChatTemplate
	fChatTemplateKwargs
	fQuery
	fQueries
	fText1
	fData1
	fDocuments
	fItems
	fText2
	fData2
	fSystem
	fInstructions
	fMessages
	fPrompt
	fInput
	fInputs
	fData
	fContent
	fTokens
	fSuffix

	fModel
	fStream
	fMaxTokens
	fMaxCompletionTokens
	fMaxOutputTokens
	fN
	fBestOf
	fCacheSalt
	fExtraKey
	fPromptCacheKey
	fPreviousResponseID
	fSessionID
	fSessionParams
	fUser
	fMetadata
	fPriority
	fStreamOptions
	fBackground
	fStore
)

const lastPromptField = fSuffix

// fieldOf returns the field with this (unescaped) name.
func fieldOf(key []byte) field {
	switch string(key) {
	case "model":
		return fModel
	case "messages":
		return fMessages
	case "stream":
		return fStream
	case "max_tokens":
		return fMaxTokens
	case "max_completion_tokens":
		return fMaxCompletionTokens
	case "max_output_tokens":
		return fMaxOutputTokens
	case "n":
		return fN
	case "best_of":
		return fBestOf
	case "tools":
		return fTools
	case "functions":
		return fFunctions
	case "chat_template":
		return fChatTemplate
	case "chat_template_kwargs":
		return fChatTemplateKwargs
	case "query":
		return fQuery
	case "queries":
		return fQueries
	case "text_1":
		return fText1
	case "text_2":
		return fText2
	case "data_1":
		return fData1
	case "data_2":
		return fData2
	case "documents":
		return fDocuments
	case "items":
		return fItems
	case "system":
		return fSystem
	case "instructions":
		return fInstructions
	case "prompt":
		return fPrompt
	case "input":
		return fInput
	case "inputs":
		return fInputs
	case "data":
		return fData
	case "content":
		return fContent
	case "tokens":
		return fTokens
	case "suffix":
		return fSuffix
	case "cache_salt":
		return fCacheSalt
	case "extra_key":
		return fExtraKey
	case "prompt_cache_key":
		return fPromptCacheKey
	case "previous_response_id":
		return fPreviousResponseID
	case "session_id":
		return fSessionID
	case "session_params":
		return fSessionParams
	case "user":
		return fUser
	case "metadata":
		return fMetadata
	case "priority":
		return fPriority
	case "stream_options":
		return fStreamOptions
	case "background":
		return fBackground
	case "store":
		return fStore
	}
	return fNone
}

// fieldSet is a set of fields.
type fieldSet uint64

func setOf(fs ...field) fieldSet {
	var s fieldSet
	for _, f := range fs {
		s |= 1 << f
	}
	return s
}

// reads says which fields Peek reads in each API's bodies. The others are only
// checked to be JSON, as is every key it doesn't know.
var reads = func() [numAPIs]fieldSet {
	every := setOf(fModel, fCacheSalt, fExtraKey, fSessionID, fSessionParams, fUser, fPriority)
	generate := every | setOf(fStream, fMaxTokens, fN, fPromptCacheKey)
	chat := setOf(fTools, fChatTemplate, fChatTemplateKwargs, fDocuments, fMessages)
	return [numAPIs]fieldSet{
		ChatCompletions: generate | chat | setOf(fFunctions, fMaxCompletionTokens, fStreamOptions, fStore),
		Completions:     generate | setOf(fPrompt, fSuffix, fBestOf, fStreamOptions),
		Responses: generate&^setOf(fN, fMaxTokens) | setOf(fTools, fInstructions, fPrompt, fInput, fChatTemplateKwargs,
			fMaxOutputTokens, fPreviousResponseID, fBackground, fStore),
		Messages:    generate&^setOf(fN, fUser) | setOf(fTools, fSystem, fMessages, fMetadata, fChatTemplateKwargs),
		CountTokens: every&^setOf(fUser) | setOf(fTools, fSystem, fMessages, fMetadata),
		Embeddings:  every | chat | setOf(fInput),
		Pooling:     every | chat | setOf(fInput, fData),
		Classify:    every | chat | setOf(fInput),
		Rerank:      every | setOf(fQuery, fDocuments),
		Score:       every | setOf(fQuery, fQueries, fText1, fText2, fData1, fData2, fDocuments, fItems),
		Tokenize:    every | chat | setOf(fPrompt, fContent, fInputs),
		Detokenize:  every | setOf(fTokens),
	}
}()

// Bounds of the numbers that are read. A body that asks for more is refused: no
// server has a context that long, and the sums made of them must not overflow.
const (
	maxTokensLimit = math.MaxInt32
	maxChoices     = 1 << 16
)

// maxKeys bounds the keys of the top-level object. The largest real bodies have
// around a hundred (vLLM's sampling parameters and extensions).
const maxKeys = 1024

// Peek reads what a gateway must know from the JSON body of a request to api and
// leaves it in r, which it resets first. It makes one pass, doesn't change or
// keep body, and doesn't allocate unless the body is refused or far from the
// ordinary (escaped strings of kilobytes, more than 64 unknown keys).
//
// Keys are compared exactly, after unescaping; values are those that
// encoding/json gives (U+FFFD for half a surrogate pair, in keys too). These are
// refused with a *BodyError: what encoding/json refuses; anything but an object;
// a byte order mark; invalid UTF-8; MaxDepth nested brackets; a key that is there
// twice in the top-level object, in any spelling; more than 1,024 keys; a field
// of Facts with a value of the wrong type or out of bounds. A field that the API
// doesn't have is not looked at. If the model is absent and the API needs one,
// the error wraps ErrModelMissing.
func Peek(api API, body []byte, r *Request) error {
	r.Reset()
	r.API = api
	if err := r.peek(api, body); err != nil {
		return err
	}
	return nil
}

func (r *Request) peek(api API, b []byte) *BodyError {
	var seen fieldSet
	var f fault
	var wanted fieldSet
	if api < numAPIs {
		wanted = reads[api]
	}
	i := skipSpace(b, 0)
	if i == len(b) || b[i] != '{' {
		return notObject(b, i)
	}
	i = skipSpace(b, i+1)
	if i < len(b) && b[i] == '}' {
		r.bodyEnd = i
		return r.finish(b, i+1)
	}
	for {
		if i >= len(b) {
			return syntaxError(faultTruncated, i)
		}
		if b[i] != '"' {
			return syntaxError(keyFault(b[i]), i)
		}
		var escaped bool
		start := i + 1
		if i, escaped, f = scanString(b, start); f != faultNone {
			return syntaxError(f, i)
		}
		key := b[start:i]
		if escaped {
			r.key = appendUnescapedString(r.key[:0], key)
			key = r.key
		}
		fd := fieldOf(key)
		if fd == fNone {
			if err := r.checkKey(b, key, start, i); err != nil {
				return err
			}
		} else {
			if seen&(1<<fd) != 0 {
				return duplicateKey(key, start-1)
			}
			seen |= 1 << fd
		}
		if i++; i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
		if i >= len(b) {
			return syntaxError(faultTruncated, i)
		}
		if b[i] != ':' {
			return syntaxError(faultColon, i)
		}
		if i++; i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
		value := i
		if i, f = skipValue(b, value, 1); f != faultNone {
			return syntaxError(f, i)
		}
		if wanted&(1<<fd) != 0 && b[value] != 'n' { // null is as good as absent
			if err := r.read(fd, b, Range{value, i}); err != nil {
				return err
			}
		} else if fd == fModel && wanted&(1<<fd) != 0 {
			return wrongType(b, "model", value, "a string that names the model")
		} else if fd == fStreamOptions && wanted&(1<<fd) != 0 {
			r.streamOptionsNull = Range{value, i}
		}
		if i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
		if i >= len(b) {
			return syntaxError(faultTruncated, i)
		}
		if b[i] == '}' {
			r.bodyEnd = i
			return r.finish(b, i+1)
		}
		if b[i] != ',' {
			return syntaxError(faultAfterValue, i)
		}
		if i++; i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
	}
}

// notObject says what a body is that doesn't begin with '{' at its first byte
// that is no space, i.
func notObject(b []byte, i int) *BodyError {
	switch {
	case len(b) == 0:
		return &BodyError{Message: "the body is empty; send a JSON object"}
	case i == len(b):
		return &BodyError{Offset: i, Message: "the body is only white space; send a JSON object"}
	case bytes.HasPrefix(b[i:], bom):
		return &BodyError{Offset: i, Message: "the body begins with a byte order mark; send UTF-8 without it"}
	case typeName(b[i]) == "":
		return syntaxError(faultValue, i)
	}
	return &BodyError{Offset: i, Message: "the body is " + typeName(b[i]) + "; send a JSON object"}
}

var bom = []byte("\xef\xbb\xbf")

// typeName names the type of the JSON value that begins with c.
func typeName(c byte) string {
	switch c {
	case '"':
		return "a string"
	case '{':
		return "an object"
	case '[':
		return "an array"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		return "a number"
	}
	return ""
}

func wrongType(b []byte, name string, at int, want string) *BodyError {
	return fieldError(name, at, "is "+typeName(b[at])+"; want "+want)
}

func duplicateKey(key []byte, at int) *BodyError {
	if len(key) > 64 {
		key = key[:64]
	}
	name := string(bytes.ToValidUTF8(key, nil))
	again := " is there twice, again at byte " + strconv.Itoa(at) + "; send it once"
	return &BodyError{Offset: at, Field: name, Message: "the key " + strconv.Quote(name) + again, quiet: "a key" + again}
}

// finish checks what can be known only at the end of the object, which is before
// b[i].
func (r *Request) finish(b []byte, i int) *BodyError {
	if i = skipSpace(b, i); i < len(b) {
		return &BodyError{Offset: i, Message: "something follows the JSON object at byte " + strconv.Itoa(i) + "; send one object and nothing else"}
	}
	if r.Model == nil && r.API < numAPIs && reads[r.API] != 0 && !r.API.ModelOptional() {
		return &BodyError{Offset: r.bodyEnd, Field: "model", Message: `model is missing; add "model": "NAME" to the body`, err: ErrModelMissing}
	}
	return nil
}

// seed makes key hashes unpredictable, so that nobody can make them collide.
var seed = maphash.MakeSeed()

// checkKey remembers an unknown key and refuses one that was there before. key is
// its unescaped form, b[start:end] its spelling.
func (r *Request) checkKey(b, key []byte, start, end int) *BodyError {
	h := maphash.Bytes(seed, key)
	for k := range r.keys[:r.nKey] {
		if r.keys[k].hash == h && sameKey(b, r.keys[k], key) {
			return duplicateKey(key, start-1)
		}
	}
	id := keyID{h, start, end}
	// Fast path: ordinary bodies.
	if r.nKey < len(r.keys) {
		r.keys[r.nKey] = id
		r.nKey++
		return nil
	}
	// Slow path: bounded, at worst half a million compares of integers.
	for _, k := range r.more {
		if k.hash == h && sameKey(b, k, key) {
			return duplicateKey(key, start-1)
		}
	}
	if len(r.keys)+len(r.more) >= maxKeys {
		return &BodyError{Offset: start - 1, Message: "the body has more than 1024 keys; send fewer"}
	}
	r.more = append(r.more, id)
	return nil
}

// sameKey reports whether the key at k, unescaped, is key.
func sameKey(b []byte, k keyID, key []byte) bool {
	raw := b[k.start:k.end]
	if bytes.IndexByte(raw, '\\') < 0 {
		return bytes.Equal(raw, key)
	}
	return bytes.Equal(appendUnescapedString(nil, raw), key)
}

// read stores the value of one field, which is valid JSON and not null.
func (r *Request) read(fd field, b []byte, v Range) (err *BodyError) {
	if fd <= lastPromptField {
		r.addPrompt(fd, b, v)
		return nil
	}
	switch fd {
	case fModel:
		if r.Model, err = r.str(b, v, "model", "a string that names the model"); err != nil {
			return err
		}
		if len(r.Model) == 0 {
			return fieldError("model", v.Start, "is empty; name a model")
		}
		r.ModelRange = v
	case fStream:
		r.StreamRange = v
		r.Stream, err = boolean(b, v, "stream")
	case fMaxTokens:
		var n int
		if n, err = integer(b, v, "max_tokens", 0, maxTokensLimit); err == nil && !r.HasMaxTokens {
			r.MaxTokens, r.HasMaxTokens = n, true
		}
	case fMaxCompletionTokens:
		r.HasMaxTokens = true
		r.MaxTokens, err = integer(b, v, "max_completion_tokens", 0, maxTokensLimit)
	case fMaxOutputTokens:
		r.HasMaxTokens = true
		r.MaxTokens, err = integer(b, v, "max_output_tokens", 0, maxTokensLimit)
	case fN:
		r.N, err = integer(b, v, "n", 0, maxChoices)
	case fBestOf:
		r.BestOf, err = integer(b, v, "best_of", 0, maxChoices)
	case fCacheSalt:
		r.CacheSalt = r.strOrRaw(b, v)
	case fExtraKey:
		r.ExtraKey = r.strOrRaw(b, v)
	case fPromptCacheKey:
		r.PromptCacheKey, err = r.str(b, v, "prompt_cache_key", "a string")
	case fPreviousResponseID:
		r.PreviousResponseID, err = r.str(b, v, "previous_response_id", "a string")
	case fSessionID:
		r.SessionID, err = r.str(b, v, "session_id", "a string")
	case fSessionParams:
		if id, ok := r.member(b, v, "id"); ok && len(r.SessionID) == 0 && b[id.Start] == '"' {
			r.SessionID, err = r.str(b, id, "session_params", "")
		}
	case fUser:
		r.User, err = r.str(b, v, "user", "a string")
	case fMetadata:
		if id, ok := r.member(b, v, "user_id"); ok && b[id.Start] == '"' {
			r.User, err = r.str(b, id, "metadata", "")
		}
	case fPriority:
		r.HasPriority = true
		r.Priority, err = integer(b, v, "priority", math.MinInt32, math.MaxInt32)
	case fStreamOptions:
		if b[v.Start] != '{' {
			return wrongType(b, "stream_options", v.Start, "an object")
		}
		r.StreamOptionsRange = v
		if u, ok := r.member(b, v, "include_usage"); ok {
			r.IncludeUsageRange = u
			if b[u.Start] != 'n' {
				r.IncludeUsage, err = boolean(b, u, "stream_options.include_usage")
			}
		}
	case fBackground:
		r.Background, err = boolean(b, v, "background")
	case fStore:
		r.HasStore = true
		r.Store, err = boolean(b, v, "store")
	}
	return err
}

// addPrompt puts v at its place among the parts of the prompt.
func (r *Request) addPrompt(fd field, b []byte, v Range) {
	k := r.PromptRanges
	if k == MaxPromptRanges {
		return
	}
	for ; k > 0 && r.promptFields[k-1] > fd; k-- {
		r.Prompt[k], r.promptFields[k] = r.Prompt[k-1], r.promptFields[k-1]
	}
	r.Prompt[k], r.promptFields[k] = v, fd
	r.PromptRanges++
	if fd == fPrompt || fd == fInput || fd == fTokens {
		r.PromptTokens = tokenIDs(v.Of(b))
		r.PromptIsTokens = r.PromptTokens > 0
	}
}

// tokenIDs returns how many token ids v holds if it is an array of them, or of
// arrays of them, and 0 if it is something else.
func tokenIDs(v []byte) int {
	i := 0
	for range 2 {
		if i < len(v) && v[i] == '[' {
			i = skipSpace(v, i+1)
		}
	}
	if i == 0 || i >= len(v) || v[i] < '0' || v[i] > '9' {
		return 0
	}
	return bytes.Count(v, comma) + 1
}

var comma = []byte{','}

// str returns the unescaped string at v.
func (r *Request) str(b []byte, v Range, name, want string) ([]byte, *BodyError) {
	if b[v.Start] != '"' {
		return nil, wrongType(b, name, v.Start, want)
	}
	raw := b[v.Start+1 : v.End-1 : v.End-1]
	if bytes.IndexByte(raw, '\\') < 0 {
		return raw, nil
	}
	start := len(r.text)
	r.text = appendUnescapedString(r.text, raw)
	return r.text[start:len(r.text):len(r.text)], nil
}

// strOrRaw returns the unescaped string at v, or the raw JSON of another value.
func (r *Request) strOrRaw(b []byte, v Range) []byte {
	if b[v.Start] != '"' {
		return v.Of(b)
	}
	s, _ := r.str(b, v, "", "")
	return s
}

// boolean returns the boolean at v.
func boolean(b []byte, v Range, name string) (bool, *BodyError) {
	if c := b[v.Start]; c != 't' && c != 'f' {
		return false, wrongType(b, name, v.Start, "true or false")
	}
	return b[v.Start] == 't', nil
}

// integer returns the integer at v, which may be written like 1e2 or 100.0.
func integer(b []byte, v Range, name string, lo, hi int64) (int, *BodyError) {
	raw := v.Of(b)
	if c := raw[0]; c != '-' && (c < '0' || c > '9') {
		return 0, wrongType(b, name, v.Start, "an integer")
	}
	n, digits := int64(0), raw
	if raw[0] == '-' {
		digits = raw[1:]
	}
	plain := len(digits) <= 18
	for _, c := range digits {
		if c < '0' || c > '9' {
			plain = false
			break
		}
		n = n*10 + int64(c-'0')
	}
	if raw[0] == '-' {
		n = -n
	}
	// Slow path: a fraction, an exponent or very many digits.
	if !plain {
		x, err := strconv.ParseFloat(string(raw), 64)
		if err == nil && x != math.Trunc(x) {
			return 0, fieldError(name, v.Start, "is not a whole number; want an integer")
		}
		if err != nil || x < float64(lo) || x > float64(hi) {
			n = hi + 1
		} else {
			n = int64(x)
		}
	}
	if n < lo || n > hi {
		return 0, fieldError(name, v.Start, "is out of bounds; want an integer from "+strconv.FormatInt(lo, 10)+" to "+strconv.FormatInt(hi, 10))
	}
	return int(n), nil
}

// member finds the value of a key in the object at obj, which is valid JSON. If
// the key is there twice the last one counts, as in encoding/json.
func (r *Request) member(b []byte, obj Range, name string) (v Range, ok bool) {
	if b[obj.Start] != '{' {
		return v, false
	}
	i := skipSpace(b, obj.Start+1)
	for b[i] != '}' {
		start := i + 1
		end, escaped, _ := scanString(b, start)
		key := b[start:end]
		if escaped {
			r.key = appendUnescapedString(r.key[:0], key)
			key = r.key
		}
		i = skipSpace(b, skipSpace(b, end+1)+1)
		value := i
		i, _ = skipValue(b, i, 1)
		if string(key) == name {
			v, ok = Range{value, i}, true
		}
		if i = skipSpace(b, i); b[i] == ',' {
			i = skipSpace(b, i+1)
		}
	}
	return v, ok
}
