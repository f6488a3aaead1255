package load

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"
)

// Kinds of failure; a status is "status 503".
const (
	failedConnect   = "connect"       // no connection
	failedTimeout   = "timeout"       // not ended within Options.Timeout
	failedBroken    = "broken"        // the connection ended before the answer
	failedCutOff    = "cut off"       // a stream ended without its end
	failedErrorSent = "error event"   // a stream brought an error
	failedAnswer    = "not an answer" // what came is not what the API says
	interrupted     = "interrupted"   // by whoever started the run: no failure
)

// A sample is what one request saw. Times are since the beginning of the run; 0 is unknown.
type sample struct {
	target, pair, turn, segment int
	measured                    bool

	intended, sent, first, last, end time.Duration
	input, cached, output            int // tokens
	failure                          string
	example                          string // of the failure
	gaps                             []time.Duration
}

// maxLineBytes bounds a line of a stream, maxAnswerBytes an answer that isn't one.
const (
	maxLineBytes   = 4 << 20
	maxAnswerBytes = 64 << 20
)

// An answer is what we read of a whole answer, or of an event of one.
type answer struct {
	Choices []struct {
		Text  string
		Delta struct {
			Content   string
			Reasoning string
			// vLLM's name for it up to 0.10, and that of others.
			ReasoningContent string          `json:"reasoning_content"`
			ToolCalls        json.RawMessage `json:"tool_calls"`
		}
		Message      *struct{ Content string }
		FinishReason string `json:"finish_reason"`
	}
	Usage *struct {
		PromptTokens        int `json:"prompt_tokens"`
		CompletionTokens    int `json:"completion_tokens"`
		PromptTokensDetails *struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	Error json.RawMessage
}

// brought reports whether an event holds a token.
func (a *answer) brought() (text string, ok bool) {
	for i := range a.Choices {
		c := &a.Choices[i]
		text += c.Text + c.Delta.Content
		ok = ok || c.Text != "" || c.Delta.Content != "" || c.Delta.Reasoning != "" || c.Delta.ReasoningContent != "" || len(c.Delta.ToolCalls) > len("null")
	}
	return text, ok
}

func (a *answer) finished() bool {
	for i := range a.Choices {
		if a.Choices[i].FinishReason != "" {
			return true
		}
	}
	return false
}

func (s *sample) usage(a *answer) {
	if u := a.Usage; u != nil {
		s.input, s.output = u.PromptTokens, u.CompletionTokens
		if d := u.PromptTokensDetails; d != nil {
			s.cached = d.CachedTokens
		}
	}
}

func (s *sample) fail(kind, format string, args ...any) {
	s.failure, s.example = kind, fmt.Sprintf(format, args...)
}

// ask sends one request, fills in s, and returns the text of the answer.
func (r *run) ask(ctx context.Context, s *sample, body []byte) string {
	t := &r.o.Targets[s.target]
	path := "/chat/completions"
	if r.o.API == "completions" {
		path = "/completions"
	}
	ctx, cancel := context.WithTimeout(ctx, r.o.Timeout)
	defer cancel()
	s.sent = time.Since(r.began)
	text, err := r.exchange(ctx, s, t, t.path(path), body)
	s.end = time.Since(r.began)
	if err == nil && s.failure == "" {
		return text
	}
	switch {
	case r.ctx.Err() != nil:
		s.failure = interrupted
	case s.failure != "":
	case errors.Is(err, context.DeadlineExceeded):
		s.fail(failedTimeout, "not ended after %s", r.o.Timeout)
	case errors.Is(err, bufio.ErrTooLong):
		s.fail(failedAnswer, "a line of more than %d bytes", maxLineBytes)
	default:
		if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
			s.fail(failedConnect, "%v", err)
		} else if _, ok := errors.AsType[*os.SyscallError](err); ok || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || op != nil {
			s.fail(failedBroken, "%v", err)
		} else {
			s.fail(failedConnect, "%v", err) // TLS, names
		}
	}
	if t.Key != "" {
		s.example = strings.ReplaceAll(s.example, t.Key, "[key]") // a server may repeat what it was sent
	}
	s.example = strings.ToValidUTF8(s.example[:min(len(s.example), 300)], "")
	return ""
}

func (r *run) exchange(ctx context.Context, s *sample, t *Target, url string, body []byte) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "kvgate-bench")
	if t.Key != "" {
		req.Header.Set("Authorization", "Bearer "+t.Key)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		s.fail(fmt.Sprintf("status %d", resp.StatusCode), "%s", errorMessage(text))
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20)) // for the connection to be used again
		return "", nil
	}
	if r.o.Stream {
		return r.readStream(s, resp.Body)
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return "", err
	}
	var a answer
	if err := json.Unmarshal(data, &a); err != nil || len(a.Choices) == 0 {
		s.fail(failedAnswer, "no choices in an answer of %d bytes", len(data))
		return "", nil
	}
	s.usage(&a)
	if m := a.Choices[0].Message; m != nil {
		return m.Content, nil
	}
	return a.Choices[0].Text, nil
}

// readStream takes the times of a stream's events.
func (r *run) readStream(s *sample, body io.Reader) (string, error) {
	lines := bufio.NewScanner(body)
	lines.Buffer(make([]byte, 0, 16<<10), maxLineBytes)
	var text strings.Builder
	var last time.Duration
	events, ended := 0, false
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !ok {
			continue // an event's other fields, comments, the empty line behind it
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			ended = true
			continue
		}
		now := time.Since(r.began)
		var a answer
		if err := json.Unmarshal(data, &a); err != nil {
			s.fail(failedAnswer, "an event that is not as it should be: %v", err)
			return "", nil
		}
		if len(a.Error) > 0 && string(a.Error) != "null" {
			s.fail(failedErrorSent, "%s", errorMessage(data))
			return "", nil
		}
		s.usage(&a)
		if words, ok := a.brought(); ok {
			text.WriteString(words)
			events++
			if s.first == 0 {
				s.first = now
			} else {
				s.gaps = append(s.gaps, now-last)
			}
			last = now
		}
		ended = ended || a.finished()
	}
	if err := lines.Err(); err != nil {
		return "", err
	}
	if !ended {
		s.fail(failedCutOff, "after %d events", events)
		return "", nil
	}
	if s.output == 0 {
		s.output = events
	}
	return text.String(), nil
}

// errorMessage is the message of an error in OpenAI's shape, or else the beginning of what came.
func errorMessage(data []byte) string {
	var e struct{ Error json.RawMessage }
	if json.Unmarshal(data, &e) == nil && len(e.Error) > 0 {
		var object struct{ Message string }
		if json.Unmarshal(e.Error, &object) == nil && object.Message != "" {
			return object.Message
		}
		return string(e.Error)
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(data)), "\n")
	return line
}

// firstModel is the first model that a target lists.
func (r *run) firstModel(ctx context.Context, t *Target) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, min(r.o.Timeout, 30*time.Second))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.path("/models"), nil)
	if err != nil {
		return "", err
	}
	if t.Key != "" {
		req.Header.Set("Authorization", "Bearer "+t.Key)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return "", fmt.Errorf("no model is named, and %s does not say which it has: %w", t.URL, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden {
		return "", fmt.Errorf("%s answered %d: it wants a key, or another one (--key-file FILE, or --key-env NAME)", t.path("/models"), resp.StatusCode)
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, 8<<20))
	var list struct{ Data []struct{ ID string } }
	if err != nil || resp.StatusCode != http.StatusOK || json.Unmarshal(data, &list) != nil || len(list.Data) == 0 {
		return "", fmt.Errorf("no model is named, and %s lists none (status %d)", t.path("/models"), resp.StatusCode)
	}
	return list.Data[0].ID, nil
}
