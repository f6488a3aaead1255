package proxy

// A Capturer gets requests as they came in, while somebody looks into what clients send. It is called by the goroutines that
// handle requests, must not block, and must copy what it keeps: what it is given is used again. model is as the client wrote
// it, head the lines of the header, credentials included.
type Capturer interface {
	Take(id, method, path, model, head, body []byte)
}

// SetCapturer has c get the requests that are read from now on; nil: nobody does. A call may still be under way for the one
// before.
func (h *Handler) SetCapturer(c Capturer) {
	if c == nil {
		h.capturer.Store(nil)
		return
	}
	h.capturer.Store(&c)
}

// capture hands on a request that has been read and whose sender may come in.
func (x *exchange) capture() {
	c := x.h.capturer.Load()
	if c == nil || x.body.n == 0 {
		return
	}
	(*c).Take(x.requestID, bytesOf(x.facts.method), x.path, x.peek.Model, x.facts.raw, x.body.bytes())
}
