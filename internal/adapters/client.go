package adapters

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// A client speaks the APIs by which model servers load and unload adapters.
type client struct {
	http   *http.Client
	apiKey string
}

func newClient(apiKey string, config *tls.Config) *client {
	t := &http.Transport{TLSClientConfig: config, DisableCompression: true, MaxIdleConnsPerHost: 1, IdleConnTimeout: 4 * time.Second}
	return &client{
		http: &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}, apiKey: apiKey,
	}
}

func (c *client) close() { c.http.CloseIdleConnections() }

// A ServerError is what a server said to a call that it did not carry out.
type ServerError struct {
	Fault   Fault
	Status  int // 0: there was no answer
	Message string
}

// Error implements error.
func (e *ServerError) Error() string {
	if e.Status == 0 {
		return e.Message
	}
	return fmt.Sprintf("status %d: %s", e.Status, e.Message)
}

// maxAnswerBytes bounds what is read of an answer.
const maxAnswerBytes = 64 << 10

// load has the server at url load an adapter. A server that has it already is as good.
//
// vLLM answers 200 with text, 400 or 404 with an error object; 404 {"detail":"Not Found"} where the routes are off
// (VLLM_ALLOW_RUNTIME_LORA_UPDATING). SGLang answers 200 or 400 with {"success":…,"error_message":…} at a path without /v1.
func (c *client) load(ctx context.Context, url, dialect, name, source string) error {
	err := c.call(ctx, url, dialect, "load_lora_adapter", map[string]string{"lora_name": name, "lora_path": source})
	if e, ok := err.(*ServerError); ok && e.Status == http.StatusBadRequest && strings.Contains(strings.ToLower(e.Message), "already") &&
		strings.Contains(strings.ToLower(e.Message), "loaded") {
		return nil
	}
	return err
}

// unload has the server forget an adapter. A server that doesn't have it is as good.
func (c *client) unload(ctx context.Context, url, dialect, name string) error {
	err := c.call(ctx, url, dialect, "unload_lora_adapter", map[string]string{"lora_name": name})
	if e, ok := err.(*ServerError); ok && e.Fault == AtAdapter {
		return nil
	}
	return err
}

func (c *client) call(ctx context.Context, url, dialect, route string, body map[string]string) error {
	path := "/v1/" + route
	if dialect == "sglang" {
		path = "/" + route
	}
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, bytes.NewReader(b))
	if err != nil {
		return &ServerError{Fault: AtEndpoint, Message: err.Error()}
	}
	req.Header.Set("Content-Type", "application/json")
	if c.apiKey != "" {
		req.Header.Set("Authorization", "Bearer "+c.apiKey)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return &ServerError{Fault: AtEndpoint, Message: err.Error()}
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return &ServerError{Fault: AtEndpoint, Message: err.Error()}
	}
	return judge(resp.StatusCode, answer)
}

// judge says what an answer means.
func judge(status int, answer []byte) error {
	var a struct {
		Success *bool           `json:"success"`
		Text    string          `json:"error_message"`
		Message string          `json:"message"`
		Detail  json.RawMessage `json:"detail"`
		Error   json.RawMessage `json:"error"`
	}
	object := json.Unmarshal(answer, &a) == nil
	if status == http.StatusOK && (!object || a.Success == nil || *a.Success) {
		return nil
	}
	e := &ServerError{Fault: AtEndpoint, Status: status, Message: strings.TrimSpace(string(answer))}
	if object {
		var inner struct {
			Message string `json:"message"`
		}
		switch {
		case a.Text != "":
			e.Message = a.Text
		case json.Unmarshal(a.Error, &inner) == nil && inner.Message != "":
			e.Message = inner.Message
		case a.Message != "":
			e.Message = a.Message
		}
	}
	if len(e.Message) > 500 {
		e.Message = e.Message[:500] + "…"
	}
	off := strings.Contains(e.Message, "LoRA is not enabled") // SGLang without --enable-lora
	route := object && a.Detail != nil || !object             // FastAPI's own answer, or one that isn't an API's: nobody is there to load
	switch {
	case (status == http.StatusNotFound || status == http.StatusMethodNotAllowed) && route, status == http.StatusBadRequest && off:
		e.Fault = Unsupported
		e.Message = "the server doesn't load adapters at run time (vLLM: --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; SGLang: --enable-lora)"
	case status == http.StatusBadRequest, status == http.StatusNotFound, status == http.StatusUnprocessableEntity, status == http.StatusOK:
		e.Fault = AtAdapter
	}
	return e
}
