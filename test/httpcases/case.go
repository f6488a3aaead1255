package httpcases

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"strings"
)

// Step is one action of the raw client or of the scripted backend.
type Step struct {
	Data      string `json:"data,omitempty"`   // latin-1: one code point is one byte
	Repeat    string `json:"repeat,omitempty"` // sent n times
	N         int    `json:"n,omitempty"`
	DripBytes int    `json:"drip_bytes,omitempty"` // write data in pieces of this size…
	DripMs    int    `json:"drip_ms,omitempty"`    // …with this pause
	SleepMs   int    `json:"sleep_ms,omitempty"`
	HalfClose bool   `json:"half_close,omitempty"` // client only: shutdown(SHUT_WR)
	Close     bool   `json:"close,omitempty"`
	Rst       bool   `json:"rst,omitempty"`

	AwaitResponses   int `json:"await_responses,omitempty"`    // client: wait for n final responses
	Await1xxMs       int `json:"await_1xx_ms,omitempty"`       // client: wait for a 1xx (or anything) at most this long
	AwaitForwardedMs int `json:"await_forwarded_ms,omitempty"` // client: wait until the backend has the request
	AwaitBytes       int `json:"await_bytes,omitempty"`        // client: wait for n body bytes…
	AwaitMs          int `json:"await_ms,omitempty"`           // …at most this long
	WaitCloseMs      int `json:"wait_close_ms,omitempty"`      // backend: hold until the proxy closes
}

// Script is the backend's answer to one inference request.
type Script struct {
	Steps    []Step `json:"steps"`
	ReadBody *bool  `json:"read_body,omitempty"` // default true; false: answer before the body is read
}

// Alt is one acceptable outcome. Every field that is present must hold.
type Alt struct {
	Name      string `json:"name,omitempty"`
	Status    []int  `json:"status,omitempty"`      // of the first final response
	OrClose   bool   `json:"or_close,omitempty"`    // no response but a closed connection is fine too
	NoResp    bool   `json:"no_response,omitempty"` // no final response at all
	NoRespOr  []int  `json:"no_response_or_status,omitempty"`
	Responses *int   `json:"responses,omitempty"`
	RespMax   *int   `json:"responses_max,omitempty"`
	Conn      string `json:"conn,omitempty"` // "close": the proxy closes; "open": it does not
	Complete  *bool  `json:"complete,omitempty"`
	No1xx     bool   `json:"no_1xx,omitempty"`

	RespBodyEquals      *string           `json:"resp_body_equals,omitempty"`
	RespBodyContains    []string          `json:"resp_body_contains,omitempty"`
	RespBodyNotContains []string          `json:"resp_body_not_contains,omitempty"`
	RespRawNotContains  []string          `json:"resp_raw_not_contains,omitempty"`
	RespHeadersAbsent   []string          `json:"resp_headers_absent,omitempty"`
	RespHeaders         map[string]string `json:"resp_headers,omitempty"`
	RespHeaderCount     map[string]int    `json:"resp_header_count,omitempty"`
	RespVersion         string            `json:"resp_version,omitempty"`
	FirstBodyWithinMs   int               `json:"first_body_within_ms,omitempty"`

	Forwarded         *int              `json:"forwarded,omitempty"` // inference requests seen by the backend
	ForwardedMax      *int              `json:"forwarded_max,omitempty"`
	ForwardedComplete *int              `json:"forwarded_complete,omitempty"`
	Body              *string           `json:"body,omitempty"` // every forwarded body
	BodySteps         []Step            `json:"body_steps,omitempty"`
	BodyLen           *int              `json:"body_len,omitempty"`
	BodySuffix        string            `json:"body_suffix,omitempty"`
	ReqMethod         string            `json:"req_method,omitempty"`
	ReqTarget         string            `json:"req_target,omitempty"`
	ReqTargetIn       []string          `json:"req_target_in,omitempty"`
	ReqOriginForm     bool              `json:"req_target_origin_form,omitempty"`
	ReqVersion        string            `json:"req_version,omitempty"`
	ReqHeadersAbsent  []string          `json:"req_headers_absent,omitempty"`
	ReqAbsentValue    map[string]string `json:"req_headers_absent_value,omitempty"`
	ReqHeaders        map[string]string `json:"req_headers,omitempty"`
	ReqHostNot        string            `json:"req_host_not,omitempty"`

	UpstreamClosedWithinMs int             `json:"upstream_closed_within_ms,omitempty"`
	ClosedWithin           json.RawMessage `json:"closed_within_ms,omitempty"` // number or a flag's name
}

// Case is one line of the case file.
type Case struct {
	ID           string   `json:"id"`
	Category     string   `json:"category"`
	Level        string   `json:"level"` // MUST, SHOULD, HARDEN
	RFC          string   `json:"rfc"`
	Title        string   `json:"title"`
	Send         []Step   `json:"send"`
	Backend      []Script `json:"backend,omitempty"`
	Expect       []Alt    `json:"expect"`
	Why          string   `json:"why"`
	MaxForwarded int      `json:"max_forwarded,omitempty"` // default 1
	TimeoutMs    int      `json:"timeout_ms,omitempty"`
	SettleMs     int      `json:"settle_ms,omitempty"`
	WithinMs     int      `json:"within_ms,omitempty"`
	Methods      []string `json:"methods,omitempty"`
	Slow         bool     `json:"slow,omitempty"`
}

//go:embed testdata/cases.jsonl
var caseFile string

// Cases returns all cases, in the order of the file.
func Cases() ([]Case, error) {
	var out []Case
	seen := map[string]bool{}
	for line := range strings.Lines(caseFile) {
		if strings.TrimSpace(line) == "" {
			continue
		}
		var c Case
		dec := json.NewDecoder(strings.NewReader(line))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&c); err != nil {
			return nil, fmt.Errorf("cases.jsonl: case %d: %w", len(out)+1, err)
		}
		if seen[c.ID] {
			return nil, fmt.Errorf("cases.jsonl: case %s is there twice", c.ID)
		}
		seen[c.ID] = true
		if c.MaxForwarded == 0 {
			c.MaxForwarded = 1
		}
		out = append(out, c)
	}
	return out, nil
}

// latin1 turns a JSON string into the bytes it stands for.
func latin1(s string) []byte {
	b := make([]byte, 0, len(s))
	for _, r := range s {
		b = append(b, byte(r))
	}
	return b
}

// stepBytes is what a data/repeat step sends.
func stepBytes(s Step, subst func(string) string) []byte {
	if s.Repeat != "" {
		return []byte(strings.Repeat(string(latin1(s.Repeat)), s.N))
	}
	return latin1(subst(s.Data))
}

// StepBytes returns what a data or repeat step sends, the nonce left in.
func StepBytes(s Step) []byte { return stepBytes(s, func(s string) string { return s }) }
