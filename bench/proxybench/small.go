package proxybench

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"

	"github.com/valyala/fasthttp"
)

// A small proxy is what the first page of a tutorial comes to: no checks, no choice, no watch, no numbers. It is what
// the rest of kvgate is paid on top of.

// RunSmall runs the small proxy of this name until its process ends.
func RunSmall(name, listen, server, certFile, keyFile string) error {
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	defer ln.Close()
	if certFile != "" {
		cert, err := tls.LoadX509KeyPair(certFile, keyFile)
		if err != nil {
			return err
		}
		ln = tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}})
	}
	switch name {
	case "reverseproxy":
		return serveReverseProxy(ln, server)
	case "fasthttp":
		return serveFasthttp(ln, server)
	}
	return fmt.Errorf("no small proxy %q; want reverseproxy or fasthttp", name)
}

func serveReverseProxy(ln net.Listener, server string) error {
	to := &url.URL{Scheme: "http", Host: server}
	p := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.SetXForwarded()
		},
		FlushInterval: -1,
		Transport:     &http.Transport{MaxIdleConns: 0, MaxIdleConnsPerHost: 10000, IdleConnTimeout: time.Minute, DisableCompression: true},
	}
	return (&http.Server{Handler: p, ReadHeaderTimeout: 10 * time.Second}).Serve(ln)
}

func serveFasthttp(ln net.Listener, server string) error {
	c := &fasthttp.HostClient{
		Addr: server, MaxConns: 20000, MaxIdleConnDuration: time.Minute, StreamResponseBody: true,
		DisableHeaderNamesNormalizing: true, DisablePathNormalizing: true, NoDefaultUserAgentHeader: true,
	}
	s := &fasthttp.Server{
		StreamRequestBody: true, MaxRequestBodySize: 64 << 20, ReadBufferSize: 16 << 10,
		DisableHeaderNamesNormalizing: true, NoDefaultServerHeader: true, NoDefaultDate: true,
		Handler: func(ctx *fasthttp.RequestCtx) {
			req, resp := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
			ctx.Request.Header.CopyTo(&req.Header)
			req.Header.Del("Connection")
			req.SetRequestURIBytes(ctx.RequestURI())
			req.SetHost(server)
			if body := ctx.RequestBodyStream(); body != nil {
				req.SetBodyStream(body, ctx.Request.Header.ContentLength())
			} else {
				req.SetBodyRaw(ctx.Request.Body())
			}
			err := c.Do(req, resp)
			fasthttp.ReleaseRequest(req)
			if err != nil {
				fasthttp.ReleaseResponse(resp)
				ctx.Error("bad gateway", fasthttp.StatusBadGateway)
				return
			}
			resp.Header.CopyTo(&ctx.Response.Header)
			ctx.Response.Header.Del("Connection")
			ctx.Response.SetStatusCode(resp.StatusCode())
			if body := resp.BodyStream(); body != nil {
				ctx.Response.SetBodyStream(relayedBody{body, resp}, resp.Header.ContentLength())
				return
			}
			ctx.Response.SetBody(resp.Body())
			fasthttp.ReleaseResponse(resp)
		},
	}
	return s.Serve(ln)
}

// relayedBody gives the response back when its body has been read.
type relayedBody struct {
	io.Reader
	resp *fasthttp.Response
}

func (b relayedBody) Close() error {
	err := b.resp.CloseBodyStream()
	fasthttp.ReleaseResponse(b.resp)
	return err
}
