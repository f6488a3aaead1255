package openai

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"
	"unicode/utf8"
)

// A refFacts is what the reference finds; it shares no code with Peek.
type refFacts struct {
	strings map[string]string // decoded strings, and raw JSON where that is allowed
	raw     map[string]string // values as they stand, read fields only
	ints    map[string]int
	bools   map[string]bool
	prompts []string // raw parts in order
}

// refPromptOrder is the documented order of the parts of a prompt.
var refPromptOrder = []string{
	"tools", "functions", "chat_template", "chat_template_kwargs", "query", "queries", "text_1", "data_1", "documents", "items",
	"text_2", "data_2", "system", "instructions", "messages", "prompt", "input", "inputs", "data", "content", "tokens", "suffix",
}

var refOther = []string{
	"model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "cache_salt", "extra_key", "prompt_cache_key",
	"previous_response_id", "session_id", "session_params", "user", "metadata", "priority", "stream_options", "background", "store",
}

// refReads lists the fields read for each API, as the documentation of the
// servers has them.
var refReads = map[API][]string{}

func init() {
	every := []string{"model", "cache_salt", "extra_key", "session_id", "session_params", "priority"}
	chat := []string{"tools", "chat_template", "chat_template_kwargs", "documents", "messages"}
	add := func(a API, more ...[]string) { refReads[a] = slices.Concat(append(more, every)...) }
	l := func(s ...string) []string { return s }
	add(ChatCompletions, chat, l("user", "stream", "max_tokens", "max_completion_tokens", "n", "prompt_cache_key", "functions", "stream_options", "store"))
	add(Completions, l("user", "stream", "max_tokens", "n", "best_of", "prompt_cache_key", "prompt", "suffix", "stream_options"))
	add(Responses, l("user", "stream", "max_output_tokens", "prompt_cache_key", "tools", "instructions", "prompt", "input", "chat_template_kwargs",
		"previous_response_id", "background", "store"))
	add(Messages, l("stream", "max_tokens", "prompt_cache_key", "tools", "system", "messages", "metadata", "chat_template_kwargs"))
	add(CountTokens, l("tools", "system", "messages", "metadata"))
	add(Embeddings, chat, l("user", "input"))
	add(Pooling, chat, l("user", "input", "data"))
	add(Classify, chat, l("user", "input"))
	add(Rerank, l("user", "query", "documents"))
	add(Score, l("user", "query", "queries", "text_1", "text_2", "data_1", "data_2", "documents", "items"))
	add(Tokenize, chat, l("user", "prompt", "content", "inputs"))
	add(Detokenize, l("user", "tokens"))
}

// refDepth returns the deepest nesting of valid JSON.
func refDepth(body []byte) int {
	dec := json.NewDecoder(bytes.NewReader(body))
	depth, deepest := 0, 0
	for {
		t, err := dec.Token()
		if err != nil {
			return deepest
		}
		switch t {
		case json.Delim('{'), json.Delim('['):
			depth++
			deepest = max(deepest, depth)
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
	}
}

// refPeek reads a body by encoding/json's tokens.
func refPeek(api API, body []byte) (f refFacts, ok bool) {
	f = refFacts{map[string]string{}, map[string]string{}, map[string]int{}, map[string]bool{}, nil}
	if !utf8.Valid(body) || !json.Valid(body) || refDepth(body) >= 512 {
		return f, false
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	if t, _ := dec.Token(); t != json.Delim('{') {
		return f, false
	}
	seen := map[string]bool{}
	unknown := 0
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			panic(err)
		}
		key := t.(string)
		if seen[key] {
			return f, false
		}
		seen[key] = true
		if !slices.Contains(refPromptOrder, key) && !slices.Contains(refOther, key) {
			if unknown++; unknown > 1024 {
				return f, false
			}
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			panic(err)
		}
		if !slices.Contains(refReads[api], key) {
			continue
		}
		if end := int(dec.InputOffset()); string(body[end-len(raw):end]) != string(raw) {
			panic("BUG: reference offsets")
		}
		if string(raw) == "null" {
			if key == "model" {
				return f, false
			}
			continue
		}
		var v any
		vd := json.NewDecoder(bytes.NewReader(raw))
		vd.UseNumber()
		if err := vd.Decode(&v); err != nil {
			panic(err)
		}
		f.raw[key] = string(raw)
		if !f.take(key, string(raw), v) {
			return f, false
		}
	}
	for _, k := range refPromptOrder {
		if raw, ok := f.raw[k]; ok {
			f.prompts = append(f.prompts, raw)
		}
	}
	if _, ok := f.strings["model"]; !ok && api != Tokenize && api != Detokenize {
		return f, false
	}
	return f, true
}

// take stores one value and reports whether it has the right type.
func (f *refFacts) take(key, raw string, v any) (ok bool) {
	switch key {
	case "model":
		f.strings[key], ok = v.(string)
		return ok && v != ""
	case "prompt_cache_key", "previous_response_id", "session_id", "user":
		f.strings[key], ok = v.(string)
		return ok
	case "cache_salt", "extra_key":
		if f.strings[key], ok = v.(string); !ok {
			f.strings[key] = raw
		}
		return true
	case "session_params", "metadata":
		inner := map[string]string{"session_params": "id", "metadata": "user_id"}[key]
		if m, ok := v.(map[string]any); ok {
			if s, ok := m[inner].(string); ok {
				f.strings[key] = s
			}
		}
		return true
	case "stream", "background", "store":
		f.bools[key], ok = v.(bool)
		return ok
	case "stream_options":
		m, ok := v.(map[string]any)
		if !ok {
			return false
		}
		if u := m["include_usage"]; u != nil {
			f.bools["include_usage"], ok = u.(bool)
		}
		return ok
	case "max_tokens", "max_completion_tokens", "max_output_tokens":
		return f.integer(key, v, 0, math.MaxInt32)
	case "n", "best_of":
		return f.integer(key, v, 0, 65536)
	case "priority":
		return f.integer(key, v, math.MinInt32, math.MaxInt32)
	}
	return true
}

func (f *refFacts) integer(key string, v any, lo, hi float64) bool {
	n, ok := v.(json.Number)
	if !ok {
		return false
	}
	x, err := n.Float64()
	f.ints[key] = int(x)
	return err == nil && x == math.Trunc(x) && x >= lo && x <= hi
}
