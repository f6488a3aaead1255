package proxy

import "sync"

// A buffer is memory for bytes in transit, on loan from a pool of its size.
type buffer struct{ b []byte }

// Buffers come in three sizes: an event or a small answer, a larger one, and bulk.
const (
	minBufferBytes = 4 << 10
	bufferStep     = 4
	maxBufferBytes = 64 << 10
)

var bufferPools [3]sync.Pool

// bufferClass returns the smallest class of n bytes or more.
func bufferClass(n int) int {
	switch {
	case n <= minBufferBytes:
		return 0
	case n <= minBufferBytes*bufferStep:
		return 1
	}
	return 2
}

// getBuffer returns a buffer of n bytes or more. Beyond maxBufferBytes it is made to measure, and not kept.
func getBuffer(n int) *buffer {
	if n > maxBufferBytes {
		return &buffer{make([]byte, 2*n)}
	}
	class := bufferClass(n)
	if b, ok := bufferPools[class].Get().(*buffer); ok {
		return b
	}
	return &buffer{make([]byte, minBufferBytes<<(2*class))}
}

// release gives b back. Nobody may use it after.
func (b *buffer) release() {
	if len(b.b) > maxBufferBytes {
		return
	}
	bufferPools[bufferClass(len(b.b))].Put(b)
}
