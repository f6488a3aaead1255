package proxy

import (
	"errors"
	"io"
	"math/bits"
	"sync"

	"github.com/valyala/fasthttp"
)

const (
	// A body buffer starts no larger than firstBodyBytes, whatever was declared, and
	// then grows fourfold as bytes come.
	firstBodyBytes = 64 << 10

	minBodyClass = 11 // 2 KiB
	maxBodyClass = 26 // 64 MiB; larger buffers aren't pooled
)

var (
	errBudget = &rejection{code: "saturated", status: 429, reason: "too many request bytes are in flight"}
	errBody   = badRequest("the request body can't be read")
)

// bodyPools hold buffers by size: the pool of class k holds those of 1<<k bytes. The
// collector empties them when they aren't used.
var bodyPools [maxBodyClass + 1]sync.Pool

// A bodyBuffer is one pooled buffer. b has a capacity of 1<<class.
type bodyBuffer struct {
	b     []byte
	class int
}

func bodyClass(n int64) int {
	return max(minBodyClass, bits.Len64(uint64(max(n, 1)-1)))
}

func getBodyBuffer(class int) *bodyBuffer {
	if class <= maxBodyClass {
		if v := bodyPools[class].Get(); v != nil {
			return v.(*bodyBuffer)
		}
	}
	return &bodyBuffer{b: make([]byte, 1<<class), class: class}
}

func putBodyBuffer(b *bodyBuffer) {
	if b.class <= maxBodyClass {
		bodyPools[b.class].Put(b)
	}
}

// A requestBody is a whole request body in memory. The zero value is an empty one.
type requestBody struct {
	buf    *bodyBuffer
	n      int
	budget *budget
}

// bytes returns the body. It is valid until release.
func (r *requestBody) bytes() []byte {
	if r.buf == nil {
		return nil
	}
	return r.buf.b[:r.n]
}

// release gives the memory back. It may be called more than once.
func (r *requestBody) release() {
	if r.buf == nil {
		return
	}
	r.budget.release(int64(len(r.buf.b)))
	putBodyBuffer(r.buf)
	*r = requestBody{}
}

// readBody reads the whole body of ctx's request into r, which must be empty. The
// limit of a body's size was enforced on the way here, by clientConn; b bounds what
// all bodies together hold. On a refusal r is empty, and the rest of the body is
// unread: the connection must be closed after the answer, which fasthttp does by
// itself where it can't skip the rest.
func readBody(ctx *fasthttp.RequestCtx, b *budget, r *requestBody) *rejection {
	src := ctx.RequestBodyStream()
	if src == nil {
		return nil
	}
	declared := int64(ctx.Request.Header.ContentLength()) // -1: chunked
	if declared == 0 {
		return nil
	}
	first := declared
	if first < 0 || first > firstBodyBytes {
		first = firstBodyBytes
		if declared < 0 {
			first = 4 << 10 // chunked requests come in all sizes
		}
	}
	r.budget = b
	if !r.grow(bodyClass(first)) {
		ctx.SetConnectionClose()
		return errBudget
	}
	for {
		if r.n == len(r.buf.b) && int64(r.n) != declared {
			class := r.buf.class + 2
			if declared > 0 {
				class = min(class, bodyClass(declared))
			}
			if !r.grow(class) {
				r.release()
				ctx.SetConnectionClose()
				return errBudget
			}
		}
		n, err := src.Read(r.buf.b[r.n:])
		r.n += n
		switch {
		case err == io.EOF && (declared < 0 || int64(r.n) == declared):
			return nil
		case err != nil:
			r.release()
			ctx.SetConnectionClose()
			if rej, ok := errors.AsType[*rejection](err); ok {
				return rej
			}
			if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
				return errBodyCut
			}
			return errBody
		case int64(r.n) == declared:
			return nil
		}
	}
}

// grow moves the body into a buffer of the class and reports whether the budget had
// room for it.
func (r *requestBody) grow(class int) bool {
	if !r.budget.acquire(1 << class) {
		return false
	}
	buf := getBodyBuffer(class)
	if old := r.buf; old != nil {
		copy(buf.b, old.b[:r.n])
		r.budget.release(int64(len(old.b)))
		putBodyBuffer(old)
	}
	r.buf = buf
	return true
}
