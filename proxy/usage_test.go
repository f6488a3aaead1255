package proxy

import (
	"strings"
	"testing"
)

func TestUsage(t *testing.T) {
	release := make(chan struct{})
	m := newMock(t, func(c *call) {
		<-release
		chat(c)
	})
	g := newGate(t, []*mock{m}, withOptions(func(o *Options, s *ServerOptions) {
		o.Limits.InFlightBodyBytes = 1 << 20
		s.Connections = 10
	}))
	expect := func(what string, ok func() bool) {
		t.Helper()
		eventually(t, what, func() bool { return ok() })
	}
	first, second := g.dial(), g.dial()
	expect("two connections of ten", func() bool {
		u := g.s.Usage()
		return u.Connections == 2 && u.MaxConnections == 10 && u.Saturation() == 0.2
	})
	first.send(post("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"`+strings.Repeat("x", 512<<10)+`"}]}`))
	expect("half of the memory for bodies", func() bool {
		u := g.s.Usage()
		return u.BodyBytes >= 512<<10 && u.MaxBodyBytes == 1<<20 && u.Saturation() >= 0.5
	})
	close(release)
	first.read()
	first.Close()
	second.Close()
	expect("nothing in use", func() bool { u := g.s.Usage(); return u.Connections == 0 && u.BodyBytes == 0 && u.Saturation() == 0 })
}
