package proxy

import (
	"fmt"
	"time"
)

// edgeOptions bounds what one client can take from us between the accepted socket
// and a whole request. The zero value of a field means its default; the zero
// edgeOptions is what a gateway on the open network should run with.
type edgeOptions struct {
	headBytes   int   // largest request head; default 40 KiB less 64 bytes, so that 32 KiB of fields pass
	targetBytes int   // longest request target; default 16 KiB
	fields      int   // most header fields; default 128
	bodyBytes   int64 // largest request body, declared or chunked; default 32 MiB

	extensionBytes int // chunk extensions of one body together; default 16 KiB

	headTimeout time.Duration // from accept, or from a later head's first byte, to the head's end; default 10 s
	idleTimeout time.Duration // between requests on one connection; default 75 s
	bodyTimeout time.Duration // for a body; grows by one second per bodyRate bytes received; default 30 s
	bodyRate    int64         // bytes a second below which bodyTimeout isn't extended fast enough; default 16 KiB/s
	writeStall  time.Duration // how long a write to the client may make no progress (up to twice this); default 30 s

	connections int // most connections at a time; default: half of what RLIMIT_NOFILE leaves after reservedDescriptors
	// ignoreHalfClose keeps serving a client that has shut down its sending side.
	// By default that counts as gone, as in nginx and HAProxy (abortonclose).
	ignoreHalfClose bool

	// onAcceptError is told of each accept error that was ridden out, onRefuse of
	// each connection refused for want of room. They must not block. May be nil.
	onAcceptError func(error)
	onRefuse      func()
}

func (o edgeOptions) withDefaults() edgeOptions {
	def(&o.headBytes, readBufferBytes-readBufferSlack)
	def(&o.targetBytes, 16<<10)
	def(&o.fields, 128)
	def(&o.bodyBytes, 32<<20)
	def(&o.extensionBytes, 16<<10)
	def(&o.headTimeout, 10*time.Second)
	def(&o.idleTimeout, 75*time.Second)
	def(&o.bodyTimeout, 30*time.Second)
	def(&o.bodyRate, 16<<10)
	def(&o.writeStall, 30*time.Second)
	def(&o.connections, defaultConnections())
	return o
}

// def gives *p its default if it isn't set.
func def[T int | int64 | time.Duration](p *T, value T) {
	if *p <= 0 {
		*p = value
	}
}

// edge is what the connections of one listener share.
type edge struct {
	edgeOptions
	limits headLimits
	watch  *watcher // nil: nobody is told when clients go
}

func newEdge(o edgeOptions, w *watcher) *edge {
	o = o.withDefaults()
	tooLarge := *errBodyTooLarge
	tooLarge.reason = fmt.Sprintf("the request body is larger than the limit of %d bytes", o.bodyBytes)
	return &edge{
		edgeOptions: o,
		limits:      headLimits{targetBytes: o.targetBytes, fields: o.fields, bodyBytes: o.bodyBytes, tooLarge: &tooLarge},
		watch:       w,
	}
}
