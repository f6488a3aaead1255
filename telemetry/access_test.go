package telemetry

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

func testLogger(w *bytes.Buffer) *zap.Logger {
	return zap.New(NewLogCore("json", zapcore.AddSync(w), zapcore.InfoLevel))
}

func TestAccessLineHasTheDocumentedFields(t *testing.T) {
	var buf bytes.Buffer
	l := &AccessLog{Logger: testLogger(&buf)}
	r := okRecord("m")
	r.Adapter, r.ClientAddr, r.Error = "m", "127.0.0.1:5", "why"
	r.Served, r.Tenant, r.Key = "m2", "t", "t-1"
	l.Observe(r)
	dec := json.NewDecoder(&buf)
	var keys []string
	if _, err := dec.Token(); err != nil {
		t.Fatal(err)
	}
	for dec.More() {
		k, err := dec.Token()
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, k.(string))
		if _, err := dec.Token(); err != nil {
			t.Fatal(err)
		}
	}
	if want := append([]string{"level", "ts", "msg"}, AccessFields...); !slices.Equal(keys, want) {
		t.Errorf("fields\n%v\nwant\n%v", keys, want)
	}
}

// What is unknown is absent, not 0.
func TestAccessLineOfARefusedRequest(t *testing.T) {
	var buf bytes.Buffer
	l := &AccessLog{Logger: testLogger(&buf)}
	l.Observe(&Record{Outcome: "model_not_found", Status: 404, ScrapeAgeSeconds: -1})
	for _, absent := range []string{"tokens", "ttft", "decision", "scrape_age", "snapshot", "error", "endpoint"} {
		if strings.Contains(buf.String(), absent) {
			t.Errorf("%s is in %s", absent, buf.String())
		}
	}
}

func TestAccessLineBoundsAndQuotesClientStrings(t *testing.T) {
	var buf bytes.Buffer
	l := &AccessLog{Logger: testLogger(&buf)}
	r := okRecord(strings.Repeat("ä", 5000))
	r.Path = "/v1/\n\"x\x1b[31m\xff"
	r.RequestID = strings.Repeat("i", 1<<20)
	l.Observe(r)
	if buf.Len() > 2048 || strings.Count(buf.String(), "\n") != 1 || strings.ContainsRune(buf.String(), 0x1b) || !utf8.Valid(buf.Bytes()) {
		t.Errorf("%d bytes: %.300q", buf.Len(), buf.String())
	}
	if !json.Valid(buf.Bytes()) {
		t.Errorf("not JSON: %.300q", buf.String())
	}
}

func TestAccessSampling(t *testing.T) {
	var buf bytes.Buffer
	n := 0
	l := &AccessLog{Logger: testLogger(&buf), Sample: true, SampleRatio: 0.1, Random: func() float64 { n++; return float64(n-1) / 100 }}
	for range 100 {
		l.Observe(okRecord("m"))
	}
	if n := strings.Count(buf.String(), "\n"); n != 10 {
		t.Errorf("%d lines of 100 good requests; want a tenth", n)
	}
	buf.Reset()
	l.Observe(&Record{Outcome: "endpoint_reset", Status: 502})
	if buf.Len() == 0 {
		t.Error("a failed request was sampled away")
	}
	buf.Reset()
	l.Off = true
	l.Observe(&Record{Outcome: "endpoint_reset", Status: 502})
	if buf.Len() != 0 {
		t.Errorf("off, and yet: %s", buf.String())
	}
}

func TestAccessLogSkipsPathsThatWentWell(t *testing.T) {
	var buf bytes.Buffer
	l := &AccessLog{Logger: testLogger(&buf), Skip: []string{"/v1/models"}}
	l.Observe(&Record{Path: "/v1/models", Outcome: "ok", Status: 200})
	if buf.Len() > 0 {
		t.Errorf("written: %s", buf.String())
	}
	l.Observe(&Record{Path: "/v1/models", Outcome: "internal", Status: 500})
	l.Observe(&Record{Path: "/v1/chat/completions", Outcome: "ok", Status: 200})
	if n := strings.Count(buf.String(), "\n"); n != 2 {
		t.Errorf("%d lines; want 2", n)
	}
}
