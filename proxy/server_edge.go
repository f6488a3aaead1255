package proxy

import (
	"bufio"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"strconv"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// serverOptions is what newServer needs.
type serverOptions struct {
	handler fasthttp.RequestHandler // required
	log     *zap.Logger             // required

	// onReject is told of every request that is refused before the handler could see
	// it, once the answer is made. The request in ctx is empty or incomplete. May be nil.
	onReject func(ctx *fasthttp.RequestCtx, rej *rejection)
	// onPanic is told what a handler panicked with, after it was logged. May be nil.
	onPanic func(value any)
}

// newServer returns a fasthttp server set up for kvgate's listener: its Serve must be
// given what newListener returns, for clientConn does the checking, limiting and timing
// of requests that the server's own settings can't do well enough.
func newServer(o serverOptions) *fasthttp.Server {
	return &fasthttp.Server{
		Handler:      recovered(o),
		ErrorHandler: func(ctx *fasthttp.RequestCtx, err error) { answerError(ctx, err, o.onReject) },
		Logger:       serverLogger{o.log},

		// The buffer must hold a whole head; clientConn refuses larger ones. It is only
		// held while a head is parsed: the server sees no bodies, so that it can give
		// its buffers back before the handler runs.
		ReadBufferSize:    readBufferBytes,
		ReduceMemoryUsage: true,
		// Timeouts are clientConn's. WriteTimeout would end streams.
		ReadTimeout:  0,
		WriteTimeout: 0,
		IdleTimeout:  0,
		// The listener limits connections.
		Concurrency: math.MaxInt32,

		DisablePreParseMultipartForm: true,
		NoDefaultServerHeader:        true,
		NoDefaultDate:                true,
		NoDefaultContentType:         true,
		SecureErrorLogMessage:        true,
		CloseOnShutdown:              true,
		KeepHijackedConns:            true,
	}
}

// recovered keeps a panic in one request from ending the process.
func recovered(o serverOptions) fasthttp.RequestHandler {
	return func(ctx *fasthttp.RequestCtx) {
		defer func() {
			v := recover()
			if v == nil {
				return
			}
			o.log.Error("panic in a handler", zap.Any("panic", v), zap.Stack("stack"))
			ctx.Response.Reset()
			writeError(ctx, 500, "internal", "internal error")
			ctx.SetConnectionClose()
			if o.onPanic != nil {
				o.onPanic(v)
			}
		}()
		o.handler(ctx)
	}
}

// answerError turns an error of reading a request into an answer. Nothing of the
// error's text gets into it.
func answerError(ctx *fasthttp.RequestCtx, err error, onReject func(*fasthttp.RequestCtx, *rejection)) {
	rej := asRejection(err)
	writeRejection(ctx, rej)
	if onReject != nil {
		onReject(ctx, rej)
	}
}

// asRejection classifies an error of reading a request.
func asRejection(err error) *rejection {
	if rej, ok := errors.AsType[*rejection](err); ok {
		return rej
	}
	var small *fasthttp.ErrSmallBuffer
	switch {
	case errors.As(err, &small), errors.Is(err, bufio.ErrBufferFull):
		return errHeadTooLarge
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errHeadTimeout
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed):
		return errClientGone
	}
	return errRequestLine
}

// writeRejection makes rej ctx's answer and has the connection closed after it.
func writeRejection(ctx *fasthttp.RequestCtx, rej *rejection) {
	writeError(ctx, rej.status, rej.code, rej.reason)
	ctx.SetConnectionClose()
}

// writeError makes an error object in OpenAI's form ctx's answer. message and code
// must be constants that need no escaping in JSON.
func writeError(ctx *fasthttp.RequestCtx, status int, code, message string) {
	switch errorKind(status) {
	case "authentication_error":
		ctx.Response.Header.Set("WWW-Authenticate", "Bearer")
	case "rate_limit_error":
		ctx.Response.Header.Set("Retry-After", "1")
	}
	ctx.SetStatusCode(status)
	ctx.SetContentType("application/json")
	ctx.SetBody(appendErrorObject(nil, status, code, message))
}

func errorKind(status int) string {
	switch {
	case status == 401:
		return "authentication_error"
	case status == 429:
		return "rate_limit_error"
	case status >= 500:
		return "server_error"
	}
	return "invalid_request_error"
}

func appendErrorObject(b []byte, status int, code, message string) []byte {
	b = append(b, `{"error":{"message":`...)
	b = strconv.AppendQuote(b, message)
	b = append(b, `,"type":"`...)
	b = append(b, errorKind(status)...)
	b = append(b, `","param":null,"code":"`...)
	b = append(b, code...)
	return append(b, `"}}`...)
}

// appendRejection appends the rest of an answer, from within its head, that says what writeRejection does.
func appendRejection(b []byte, rej *rejection) []byte {
	switch errorKind(rej.status) {
	case "authentication_error":
		b = append(b, "WWW-Authenticate: Bearer\r\n"...)
	case "rate_limit_error":
		b = append(b, "Retry-After: 1\r\n"...)
	}
	body := appendErrorObject(nil, rej.status, rej.code, rej.reason)
	b = append(b, "Content-Length: "...)
	b = strconv.AppendInt(b, int64(len(body)), 10)
	b = append(b, "\r\n\r\n"...)
	return append(b, body...)
}

// serverLogger takes fasthttp's messages. They may quote what clients sent, keys
// included, so only the format string, which is fasthttp's own, is logged, and only
// when debugging.
type serverLogger struct{ log *zap.Logger }

func (l serverLogger) Printf(format string, _ ...any) {
	if e := l.log.Check(zap.DebugLevel, "http server"); e != nil {
		e.Write(zap.String("format", format))
	}
}
