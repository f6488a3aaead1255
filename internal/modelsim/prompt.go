package modelsim

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// Text and tokens. A token is four bytes of the rendered prompt, near enough to
// English under a 128k vocabulary, and reversible: detokenize gives the text back.
// Answers are words: each token of an answer is one word.

const bytesPerToken = 4

// maxEchoWords is how many words of the user's text an answer starts with, so
// that a test can find the nonce it sent.
const maxEchoWords = 32

// prompt is one rendered prompt.
type prompt struct {
	text []byte
	echo []string
}

func (p *prompt) tokens() int { return max(1, (len(p.text)+bytesPerToken-1)/bytesPerToken) }

// blocks are the prefix-chained ids of the prompt's full KV blocks. As in vLLM,
// adapter and cache salt are part of the chain.
func (p *prompt) blocks(blockTokens int, adapter, salt string) []uint64 {
	size := blockTokens * bytesPerToken
	out := make([]uint64, len(p.text)/size)
	chain := xxhash.Sum64String(adapter + "\x00" + salt)
	var link [8]byte
	var d xxhash.Digest
	for i := range out {
		binary.LittleEndian.PutUint64(link[:], chain)
		d.Reset()
		d.Write(link[:])
		d.Write(p.text[i*size : (i+1)*size])
		chain = d.Sum64()
		out[i] = chain
	}
	return out
}

// chatMessage is a message of the chat, Responses or Messages API.
type chatMessage struct {
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	ToolCalls json.RawMessage `json:"tool_calls"`
	Type      string          `json:"type"`
}

// renderChat is the chat template: tools, then each message after its role.
func renderChat(messages []chatMessage, tools json.RawMessage) prompt {
	var p prompt
	if len(tools) > 0 && !bytes.Equal(tools, []byte("null")) {
		p.text = append(append(p.text, tools...), '\n')
	}
	for _, m := range messages {
		p.text = append(p.text, "<|"...)
		p.text = append(p.text, m.Role...)
		p.text = append(p.text, "|>\n"...)
		start := len(p.text)
		p.text = appendContent(p.text, m.Content)
		if m.Role == "user" {
			p.echo = firstWords(p.text[start:])
		}
		p.text = append(p.text, m.ToolCalls...)
		p.text = append(p.text, '\n')
	}
	p.text = append(p.text, "<|assistant|>\n"...)
	return p
}

// appendContent appends the text of a message's content: a string, or parts of
// which those without text count as their JSON.
func appendContent(dst []byte, content json.RawMessage) []byte {
	if len(content) == 0 || bytes.Equal(content, []byte("null")) {
		return dst
	}
	var s string
	if json.Unmarshal(content, &s) == nil {
		return append(dst, s...)
	}
	var parts []json.RawMessage
	if json.Unmarshal(content, &parts) != nil {
		return append(dst, content...)
	}
	for _, part := range parts {
		var t struct {
			Text *string `json:"text"`
		}
		if json.Unmarshal(part, &t) == nil && t.Text != nil {
			dst = append(dst, *t.Text...)
		} else {
			dst = append(dst, part...)
		}
	}
	return dst
}

func firstWords(text []byte) []string {
	// A long document is not split whole for its first few words.
	words := strings.Fields(string(text[:min(len(text), 4096)]))
	return words[:min(len(words), maxEchoWords)]
}

// rawPrompts reads the prompt of /v1/completions or the input of /v1/embeddings:
// a string, strings, token ids, or lists of token ids.
func rawPrompts(raw json.RawMessage) ([]prompt, bool) {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return []prompt{textPrompt(s)}, true
	}
	var ids []int64
	if json.Unmarshal(raw, &ids) == nil && len(ids) > 0 {
		return []prompt{{text: tokenBytes(ids)}}, true
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || len(list) == 0 {
		return nil, false
	}
	var out []prompt
	for _, item := range list {
		var ids []int64
		if json.Unmarshal(item, &s) == nil {
			out = append(out, textPrompt(s))
		} else if json.Unmarshal(item, &ids) == nil {
			out = append(out, prompt{text: tokenBytes(ids)})
		} else {
			return nil, false
		}
	}
	return out, true
}

func textPrompt(s string) prompt { return prompt{text: []byte(s), echo: firstWords([]byte(s))} }

// tokenBytes and byteTokens convert between token ids and the bytes they stand for.
func tokenBytes(ids []int64) []byte {
	b := make([]byte, 0, len(ids)*bytesPerToken)
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return b
}

func byteTokens(text []byte) []int64 {
	var ids []int64
	for len(text) > 0 {
		var chunk [bytesPerToken]byte
		text = text[copy(chunk[:], text):]
		ids = append(ids, int64(binary.LittleEndian.Uint32(chunk[:])))
	}
	return ids
}

// answer produces the words of one answer.
type answer struct {
	echo []string
	seed uint64
}

var fillerWords = strings.Fields(`the cache holds what was said before and each block
	of it waits for a prompt that begins the same way so that the next answer starts
	sooner while batches of short steps carry many requests at once over one model`)

// word is the i-th token of the answer, with the space before it.
func (a *answer) word(i int) string {
	w := ""
	if i < len(a.echo) {
		w = a.echo[i]
	} else {
		w = fillerWords[mix(a.seed+uint64(i))%uint64(len(fillerWords))]
	}
	if i == 0 {
		return w
	}
	return " " + w
}

func (a *answer) text(words int) string {
	var b strings.Builder
	for i := range words {
		b.WriteString(a.word(i))
	}
	return b.String()
}

// drawnLength is how long the answer would be if nothing limited it: exponential
// with the given mean, at least one token and at most eight times the mean.
func (a *answer) drawnLength(mean int) int {
	u := float64(mix(a.seed)>>11) / (1 << 53)
	return max(1, min(8*mean, int(math.Round(-float64(mean)*math.Log1p(-u)))))
}

// mix is splitmix64's finalizer (Steele, Lea, Flood: Fast splittable
// pseudorandom number generators, OOPSLA 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
