package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"
)

// A Card describes one model in the list that a server gives at /v1/models.
type Card struct {
	ID          string
	Parent      string          // the base model of an adapter; empty if none or unknown
	Root        string          // where it was loaded from; empty if unknown
	MaxModelLen int             // context length in tokens; 0 if unknown
	Raw         json.RawMessage // the card as it came
}

// ParseModelList reads the answer to GET /v1/models. It takes the list from
// "data" (all servers of the OpenAI API) or else from "models" (Ollama's and
// llama.cpp's own shape), or from an array. Cards without an id (or name, model)
// are left out. Fields of odd types are unknown.
func ParseModelList(body []byte) ([]Card, error) {
	var list struct {
		Data   []json.RawMessage `json:"data"`
		Models []json.RawMessage `json:"models"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		var te *json.UnmarshalTypeError
		if !errors.As(err, &te) || json.Unmarshal(body, &list.Data) != nil {
			return nil, fmt.Errorf("list of models: %w", err)
		}
	}
	if list.Data == nil {
		list.Data = list.Models
	}
	if list.Data == nil {
		return nil, errors.New(`list of models: no "data"; want {"object":"list","data":[…]}`)
	}
	cards := make([]Card, 0, len(list.Data))
	for _, raw := range list.Data {
		var m map[string]json.RawMessage
		if json.Unmarshal(raw, &m) != nil {
			continue
		}
		c := Card{Parent: str(m["parent"]), Root: str(m["root"]), Raw: raw}
		for _, key := range [...]string{"id", "name", "model"} {
			if c.ID = str(m[key]); c.ID != "" {
				break
			}
		}
		if c.ID == "" {
			continue
		}
		// vLLM and SGLang, then llama.cpp (meta.n_ctx_train is what the model was trained
		// for, n_ctx what the server has room for), then others.
		c.MaxModelLen = positive(m["max_model_len"])
		var meta map[string]json.RawMessage
		if json.Unmarshal(m["meta"], &meta) == nil && c.MaxModelLen == 0 {
			c.MaxModelLen = positive(meta["n_ctx"])
		}
		for _, key := range [...]string{"context_length", "max_context_length", "context_window"} {
			if c.MaxModelLen == 0 {
				c.MaxModelLen = positive(m[key])
			}
		}
		cards = append(cards, c)
	}
	return cards, nil
}

func str(raw json.RawMessage) (s string) {
	if json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

func positive(raw json.RawMessage) (n int) {
	if json.Unmarshal(raw, &n) != nil || n < 0 {
		return 0
	}
	return n
}

// AppendModelList appends the answer to GET /v1/models: the cards in the order
// given, each as it came from its server; of cards with the same id the first.
func AppendModelList(dst []byte, cards ...Card) []byte {
	dst = append(dst, `{"object":"list","data":[`...)
	seen := make(map[string]bool, len(cards))
	for _, c := range cards {
		if seen[c.ID] {
			continue
		}
		if len(seen) > 0 {
			dst = append(dst, ',')
		}
		seen[c.ID] = true
		dst = AppendCard(dst, c)
	}
	return append(dst, "]}"...)
}

// AppendCard appends the card as it came from its server, or, if it came from
// none (Raw is empty), one made of what is known.
func AppendCard(dst []byte, c Card) []byte {
	if len(c.Raw) > 0 && utf8.Valid(c.Raw) {
		return append(dst, c.Raw...)
	}
	dst = append(dst, `{"id":`...)
	dst = appendQuoted(dst, c.ID)
	dst = append(dst, `,"object":"model","created":0,"owned_by":"kvgate"`...)
	if c.Root != "" {
		dst = append(dst, `,"root":`...)
		dst = appendQuoted(dst, c.Root)
	}
	if c.Parent != "" {
		dst = append(dst, `,"parent":`...)
		dst = appendQuoted(dst, c.Parent)
	}
	if c.MaxModelLen > 0 {
		dst = fmt.Appendf(dst, `,"max_model_len":%d`, c.MaxModelLen)
	}
	return append(dst, '}')
}
