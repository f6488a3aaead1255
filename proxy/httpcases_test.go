package proxy

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"kvgate/test/httpcases"
)

// The edge alone, with the plainest forwarding behind it, must stop or pass every
// request as the cases want it. What endpoints answer is not its matter.
func TestEdgeHTTPCases(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 10 s")
	}
	o := httpcases.Options{
		Skip:   func(c *httpcases.Case) bool { return c.Category == "response" || c.ID == "P07" },
		Runner: httpcases.Runner{HeaderTimeout: 3 * time.Second, BodyTimeout: 4 * time.Second, IdleTimeout: 4 * time.Second},
	}
	httpcases.Play(t, o, func(t *testing.T, endpoint string) string {
		var e *edgeServer
		e = startEdge(t, edgeOptions{headTimeout: time.Second, idleTimeout: 2 * time.Second, bodyTimeout: 2 * time.Second}, serverOptions{
			handler: func(ctx *fasthttp.RequestCtx) { forwardPlainly(ctx, e, endpoint) },
		})
		return e.addr
	})
}

type cancelOnGone struct{ cancel context.CancelFunc }

func (c cancelOnGone) clientGone() { c.cancel() }

type watchedBody struct {
	io.ReadCloser
	h      watchHandle
	cancel context.CancelFunc
}

func (b watchedBody) Close() error {
	b.h.stop()
	b.cancel()
	return b.ReadCloser.Close()
}

func forwardPlainly(ctx *fasthttp.RequestCtx, e *edgeServer, endpoint string) {
	path, _, _ := strings.Cut(string(ctx.RequestURI()), "?")
	if path != "/v1/chat/completions" {
		writeError(ctx, 404, "not_found", "no such path")
		return
	}
	if !ctx.IsPost() {
		writeError(ctx, 405, "method_not_allowed", "no such method")
		return
	}
	var body requestBody
	defer body.release()
	if rej := readBody(ctx, e.budget, &body); rej != nil {
		writeRejection(ctx, rej)
		return
	}
	cc, cancel := context.WithCancel(context.Background())
	h := e.watch.watch(ctx.Conn(), cancelOnGone{cancel})
	req, err := http.NewRequestWithContext(cc, string(ctx.Method()), "http://"+endpoint, bytes.NewReader(bytes.Clone(body.bytes())))
	if err != nil {
		writeError(ctx, 500, "internal", "request")
		return
	}
	req.URL.Opaque = string(ctx.RequestURI())
	nominated := strings.ToLower(string(bytes.Join(ctx.Request.Header.PeekAll("Connection"), []byte(","))))
	for k, v := range ctx.Request.Header.All() {
		k := strings.ToLower(string(k))
		switch {
		case strings.Contains(nominated, k), steersRouting([]byte(k)):
		case k == "host", k == "content-length", k == "transfer-encoding", k == "connection", k == "expect", k == "te", k == "trailer",
			k == "keep-alive", k == "proxy-connection", k == "upgrade":
		default:
			req.Header.Add(k, string(v))
		}
	}
	resp, err := (&http.Transport{DisableCompression: true}).RoundTrip(req)
	if err != nil {
		h.stop()
		cancel()
		writeError(ctx, 502, "endpoint_reset", "no answer")
		return
	}
	ctx.SetStatusCode(resp.StatusCode)
	ctx.SetContentType(resp.Header.Get("Content-Type"))
	ctx.Response.Header.Set("Content-Encoding", resp.Header.Get("Content-Encoding"))
	ctx.SetBodyStream(watchedBody{resp.Body, h, cancel}, int(resp.ContentLength))
}
