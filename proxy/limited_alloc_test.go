//go:build !race

package proxy

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"kvgate/internal/auth"
	"kvgate/internal/caller"
	"kvgate/internal/names"
	"kvgate/internal/quota"
)

// withEverything has a gate ask for a key, resolve an alias, answer with the name that was asked for, and count against limits.
func withEverything(t testing.TB) (key string, opts []gateOption) {
	t.Helper()
	key = auth.NewKey()
	sum, _ := auth.Sum(key)
	ring := auth.New([]auth.Key{{ID: "k", Sum: sum, Tenant: "a", Class: caller.High, Models: []string{"m*"}}}, nil, nil)
	var limits []quota.Limit
	for k, n := range map[quota.Kind]int64{quota.Requests: 1e9, quota.TotalTokens: 1e11, quota.Concurrent: 1000} {
		limits = append(limits, limit(k, n, time.Second))
	}
	l := quota.New(quota.Options{Limits: limits})
	return key, []gateOption{
		withNames(names.Options{Rules: []names.Rule{{Model: "gpt", To: one("m"), Answer: names.AnswerAsked, Fallback: []string{"n"}}}}),
		func(g *gate, _ *Options, _ *ServerOptions) {
			g.routes = append(g.routes, func(r *Routes) {
				r.Auth, r.NeedUsage, r.ModelHeaders = ring, true, true
				r.Quotas = &Quotas{Limiter: l, AssumedOutputTokens: 100, Headers: true}
			})
		},
	}
}

// Keys, rules, limits and rewritten answers cost no garbage either.
func TestAllocationsWithKeysAndLimits(t *testing.T) {
	f := func(name, reply, body, end string, want float64) {
		t.Run(name, func(t *testing.T) {
			key, opts := withEverything(t)
			c := instantGate(t, reply, opts...)
			request := []byte(post(chatPath, strings.Replace(body, `"m"`, `"gpt"`, 1), "Authorization: Bearer "+key))
			loop(t, c.Conn, request, []byte(end), 500)
			var before, after runtime.MemStats
			const n = 2000
			runtime.ReadMemStats(&before)
			loop(t, c.Conn, request, []byte(end), n)
			runtime.ReadMemStats(&after)
			per := float64(after.Mallocs-before.Mallocs) / n
			t.Logf("%.2f allocations, %.0f bytes per request", per, float64(after.TotalAlloc-before.TotalAlloc)/n)
			if per > want {
				t.Errorf("%.2f allocations per request; want %.1f at most", per, want)
			}
		})
	}
	f("plain", plainReply, plainBody, "0\r\n\r\n", 3)
	f("stream", streamReply, streamBody, "0\r\n\r\n", 3)
}

func BenchmarkPlainWithKeysAndLimits(b *testing.B) {
	key, opts := withEverything(b)
	run := func(name, body string, end string, fields []string, opts ...gateOption) {
		b.Run(name, func(b *testing.B) {
			c := instantGate(b, plainReply, opts...)
			request := []byte(post(chatPath, body, fields...))
			loop(b, c.Conn, request, []byte(end), 100)
			b.ReportAllocs()
			for b.Loop() {
				loop(b, c.Conn, request, []byte(end), 1)
			}
		})
	}
	run("off", plainBody, "}", nil)
	run("on", strings.Replace(plainBody, `"m"`, `"gpt"`, 1), "0\r\n\r\n", []string{"Authorization: Bearer " + key}, opts...)
}
