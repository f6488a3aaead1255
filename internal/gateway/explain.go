package gateway

import (
	"strings"

	"kvgate/internal/admin"
	"kvgate/pool"
	"kvgate/proxy"
	"kvgate/scoring"
)

// Explain tells how a request would be handled now. It books nothing.
func (g *Gateway) Explain(in *admin.Inquiry) (scoring.Explanation, error) {
	q := &proxy.Inquiry{Path: in.Path, Body: in.Body, Key: in.Key}
	if len(in.Fields) > 0 {
		q.Head = []byte(strings.Join(in.Fields, "\r\n") + "\r\n")
	}
	return g.handler.Explain(q)
}

// Explain tells how a request with this body to this path is decided on a table at now by its pool's policy, with no rules,
// aliases or limits, whoever sends it.
func Explain(t *pool.Table, now pool.Instant, path string, body []byte, policy func(pool string) *scoring.Policy) (scoring.Explanation, error) {
	s := t.Load()
	var pools []proxy.PoolOptions
	for i := range s.Pools {
		pools = append(pools, proxy.PoolOptions{Name: s.Pools[i].Name, Policy: policy(s.Pools[i].Name)})
	}
	routes, err := proxy.NewRoutes(pools)
	if err != nil {
		return scoring.Explanation{}, err
	}
	h, err := proxy.New(proxy.Options{Table: t, Routes: routes, Now: func() pool.Instant { return now }})
	if err != nil {
		return scoring.Explanation{}, err
	}
	defer h.Close()
	return h.Explain(&proxy.Inquiry{Path: path, Body: body})
}
