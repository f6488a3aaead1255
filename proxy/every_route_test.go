package proxy

import (
	"bytes"
	"fmt"
	"mime/multipart"
	"strings"
	"sync"
	"testing"
)

// jsonRoutes are all paths with a JSON body, and the least each takes besides the model.
var jsonRoutes = map[string]string{
	"/v1/chat/completions":      `"messages":[{"role":"user","content":"hi"}]`,
	"/v1/completions":           `"prompt":"hi"`,
	"/v1/embeddings":            `"input":"hi"`,
	"/v1/responses":             `"input":"hi"`,
	"/v1/messages":              `"max_tokens":5,"messages":[{"role":"user","content":"hi"}]`,
	"/v1/messages/count_tokens": `"messages":[{"role":"user","content":"hi"}]`,
	"/rerank":                   `"query":"a","documents":["b"]`,
	"/v1/rerank":                `"query":"a","documents":["b"]`,
	"/v2/rerank":                `"query":"a","documents":["b"]`,
	"/score":                    `"text_1":"a","text_2":"b"`,
	"/v1/score":                 `"text_1":"a","text_2":"b"`,
	"/pooling":                  `"input":"hi"`,
	"/classify":                 `"input":"hi"`,
	"/v1/classify":              `"input":"hi"`,
	"/tokenize":                 `"prompt":"hi"`,
	"/v1/tokenize":              `"prompt":"hi"`,
	"/detokenize":               `"tokens":[1]`,
	"/v1/detokenize":            `"tokens":[1]`,
}

// form is a multipart request whose model stands behind a file of fileBytes.
func form(t testing.TB, path string, fileBytes int) (request, body string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	f, err := w.CreateFormFile("file", "speech.wav")
	if err != nil {
		t.Fatal(err)
	}
	f.Write(bytes.Repeat([]byte("RIFF\r\n--x\r\n"), fileBytes/12+1))
	for _, kv := range [][2]string{{"temperature", "0"}, {"model", "m"}, {"language", "en"}} {
		if err := w.WriteField(kv[0], kv[1]); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: gate\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", path, w.FormDataContentType(), b.Len(), b.String()), b.String()
}

// B4: every proxied path counts as load, from the choice to the end.
func TestEveryRouteCountsAsLoad(t *testing.T) {
	requests := map[string]string{}
	for path, fields := range jsonRoutes {
		requests[path] = post(path, `{"model":"m",`+fields+`}`)
	}
	for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
		requests[path], _ = form(t, path, 100)
	}
	for path, request := range requests {
		t.Run(strings.ReplaceAll(path[1:], "/", "_"), func(t *testing.T) {
			release := make(chan struct{})
			slow := func(c *call) { <-release; c.json(200, `{"object":"x"}`) }
			mocks := []*mock{newMock(t, slow), newMock(t, slow), newMock(t, slow), newMock(t, slow)}
			g := newGate(t, mocks)
			var wg sync.WaitGroup
			for range 40 {
				c := g.dial().send(request)
				wg.Go(func() {
					if r := c.read(); r.StatusCode != 200 || r.err != nil {
						t.Errorf("answer %d %q, %v", r.StatusCode, r.body, r.err)
					}
				})
			}
			g.booked(40)
			eventually(t, "all requests to arrive", func() bool {
				n := int64(0)
				for _, m := range mocks {
					n += m.requests.Load()
				}
				return n == 40
			})
			for i, m := range mocks {
				if n := m.requests.Load(); n < 8 || n > 12 {
					t.Errorf("mock %d got %d of 40; want 10 or so", i, n)
				}
			}
			close(release)
			wg.Wait()
			g.booked(0)
		})
	}
}

// D7: a form reaches the endpoint as it was sent, and its model is found behind a large file.
func TestFormsPassUntouched(t *testing.T) {
	m := newMock(t, func(c *call) { c.json(200, `{"text":"hello"}`) })
	g := newGate(t, []*mock{m})
	request, body := form(t, "/v1/audio/transcriptions", 5<<20)
	if r := g.dial().send(request).read(); r.StatusCode != 200 || r.body != `{"text":"hello"}` {
		t.Fatalf("answer %d %q", r.StatusCode, r.body)
	}
	if got := m.lastCall(); string(got.body) != body {
		t.Errorf("the endpoint got %d bytes that differ from the %d sent", len(got.body), len(body))
	}
	if r := g.sink.wait(t, 1)[0]; r.Model != "m" || r.API != "transcriptions" {
		t.Errorf("record: model %q, API %q", r.Model, r.API)
	}
}
