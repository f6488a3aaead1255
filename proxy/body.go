package proxy

import (
	"math/bits"
	"sync"

	"github.com/valyala/fasthttp"
)

const (
	// A body buffer starts no larger than firstBodyBytes, whatever was declared, unless the
	// client has sent as much before, and then grows fourfold as bytes come.
	firstBodyBytes = 64 << 10

	maxBodyClass = 60 // 64 MiB; larger buffers aren't pooled
)

var errBudget = &rejection{code: "saturated", status: 429, reason: "too many request bytes are in flight"}

// bodyPools hold buffers by size. The collector empties them when they aren't used.
var bodyPools [maxBodyClass + 1]sync.Pool

// A bodyBuffer is one pooled buffer, as long as its class says.
type bodyBuffer struct {
	b     []byte
	class int
}

// There are four classes to each doubling, so that a buffer is at most a quarter
// larger than what it was asked for: 2, 2.5, 3, 3.5, 4, 5… KiB.
func classBytes(class int) int { return (4 + class&3) << (9 + class>>2) }

// doubled is how many classes further buffers have twice the size.
const doubled = 4

// bodyClass returns the class of the smallest buffers for n bytes.
func bodyClass(n int64) int {
	if n <= 2<<10 {
		return 0
	}
	shift := bits.Len64(uint64(n-1)) - 3 // n-1 is 4 to 7 times 1<<shift, and a bit
	return (shift-9)*doubled + int(uint64(n-1)>>shift) - 4 + 1
}

func getBodyBuffer(class int) *bodyBuffer {
	if class <= maxBodyClass {
		if v := bodyPools[class].Get(); v != nil {
			return v.(*bodyBuffer)
		}
	}
	return &bodyBuffer{b: make([]byte, classBytes(class)), class: class}
}

func putBodyBuffer(b *bodyBuffer) {
	if b.class <= maxBodyClass {
		bodyPools[b.class].Put(b)
	}
}

// A requestBody is a whole request body in memory. The zero value is an empty one.
type requestBody struct {
	n      int // bytes
	budget *budget
	held   int64 // bytes of the budget
	// One of the two: a buffer of the body's own, or the connection's, lent.
	buf    *bodyBuffer
	lent   []byte
	lender *clientConn
}

// bytes returns the body. It is valid until release.
func (r *requestBody) bytes() []byte {
	if r.buf == nil {
		return r.lent
	}
	return r.buf.b[:r.n]
}

// release gives the memory back. It may be called more than once, and must be before
// the handler returns.
func (r *requestBody) release() {
	if r.held > 0 {
		r.budget.release(r.held)
	}
	if r.buf != nil {
		putBodyBuffer(r.buf)
	}
	c := r.lender
	*r = requestBody{}
	if c != nil {
		c.lent = false
		c.freeInput()
	}
}

// readBody reads the whole body of ctx's request into r, which must be empty. The
// limit of a body's size is enforced on the way; b bounds what all bodies together
// hold. On a refusal r is empty, and the rest of the body may be unread: the connection
// is closed after the answer.
func readBody(ctx *fasthttp.RequestCtx, b *budget, r *requestBody) *rejection {
	c := asClientConn(ctx.Conn())
	if c == nil {
		panic("BUG: the server was not given connections of our listener")
	}
	rej := c.readBody(b, r)
	if rej != nil {
		ctx.SetConnectionClose()
	}
	return rej
}

// grow moves the body into a buffer of the class and reports whether the budget had room for it. A body is charged for
// what it may come to, most, if the buffer is larger, so that one of the permitted size always fits into a budget of that
// size; the copy that is dropped here isn't counted.
func (r *requestBody) grow(class int, most int64) bool {
	size := min(int64(classBytes(class)), most)
	if !r.budget.acquire(size - r.held) {
		return false
	}
	r.held = size
	buf := getBodyBuffer(class)
	if old := r.buf; old != nil {
		copy(buf.b, old.b[:r.n])
		putBodyBuffer(old)
	}
	r.buf = buf
	return true
}
