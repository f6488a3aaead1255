//go:build !unix

package proxy

// canTryRead: reading waits with a buffer.
const canTryRead = false

// peek can't look at a connection here; that it is young has to do.
func (c *endpointConn) peek(uintptr) { c.alive = true }

// tryRead is not used here.
func (c *endpointConn) tryRead(uintptr) bool { return true }

func (c *endpointConn) trySendRead(uintptr) bool { return true }

// relaySome is not used here.
func (x *exchange) relaySome(uintptr) bool { return true }
