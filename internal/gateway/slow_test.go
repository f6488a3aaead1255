package gateway

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"kvgate/config"
	"kvgate/scoring"
	"kvgate/telemetry"
)

func TestSlowRequestsAreLoggedWithTheirExplanation(t *testing.T) {
	var buf bytes.Buffer
	c := config.Default().Log
	c.Slow, c.Access = 2*time.Second, "off"
	l, err := newLogs(&c, &buf)
	if err != nil {
		t.Fatal(err)
	}
	l.explanation = func(n uint64) (scoring.Explanation, bool) {
		return scoring.Explanation{Policy: "auto", Chosen: "p/a"}, n == 7
	}
	r := &telemetry.Record{
		RequestID: "one", Outcome: "ok", Model: "m", Pool: "p", Endpoint: "p/a", DurationSeconds: 1.99, QueueSeconds: 0.5, Explained: 7,
		Attempts: []telemetry.Attempt{{Endpoint: "p/a", Outcome: "ok", Seconds: 1}},
	}
	l.Observe(r)
	if buf.Len() > 0 {
		t.Errorf("a request that is not slow: %s", buf.String())
	}
	r.DurationSeconds = 2
	for range 50 { // a storm: few are written, and how many were not is said
		l.Observe(r)
	}
	l.nextSlow.Store(0)
	l.Observe(r)
	lines := bytes.Split(bytes.TrimSpace(buf.Bytes()), []byte("\n"))
	if len(lines) < 2 || len(lines) > 10 {
		t.Fatalf("%d lines of 51", len(lines))
	}
	var got struct {
		Level, Msg  string
		RequestID   string  `json:"request_id"`
		Queue       float64 `json:"queue_seconds"`
		Attempts    []struct{ Endpoint string }
		Explanation struct{ Policy, Chosen string }
		NotLogged   int `json:"slow_requests_not_logged"`
	}
	if err := json.Unmarshal(lines[len(lines)-1], &got); err != nil {
		t.Fatal(err)
	}
	if got.Level != "warn" || got.Msg != "slow request" || got.RequestID != "one" || got.Queue != 0.5 || got.Explanation.Chosen != "p/a" || len(got.Attempts) != 1 || got.Attempts[0].Endpoint != "p/a" || got.NotLogged == 0 {
		t.Errorf("%s", lines[len(lines)-1])
	}
	c.Slow = 0
	buf.Reset()
	if err := l.configure(&c); err != nil {
		t.Fatal(err)
	}
	l.nextSlow.Store(0)
	if l.Observe(r); buf.Len() > 0 {
		t.Errorf("switched off: %s", buf.String())
	}
}
