package policies

import (
	"slices"
	"time"

	"kvgate/internal/adapters"
	"kvgate/pool"
	"kvgate/scoring"
)

// Managed is kvgate's default policy with the adapters managed: endpoints have none to begin with, and get them as the
// planner says. loads counts what happened.
func Managed(name, doc string, o adapters.PlanOptions, loads *AdapterLoads) Policy {
	return Policy{Name: name, Doc: doc, New: func(f *Fleet) (Router, error) { return newManaged(f, o, loads) }}
}

// AdapterLoads counts loads and unloads by the gateway.
type AdapterLoads struct {
	Asked, Ahead, Unloads int
	Waited                int // requests that waited for a load
}

type managed struct {
	*product
	planner *adapters.Planner
	id      map[string]int32 // of adapters
	under   []underWay       // loads, in order of the time they end
	waiters map[string][]*Call
	waiting int
	due     time.Duration // of the next plan
	loads   *AdapterLoads
}

type underWay struct {
	at     time.Duration
	action adapters.Action
}

const (
	planEvery = time.Second
	// sourceLoad is how long a server takes to read an adapter from its source, and callTime what the call takes besides.
	sourceLoad = 500 * time.Millisecond
	callTime   = 20 * time.Millisecond
)

func newManaged(f *Fleet, o adapters.PlanOptions, loads *AdapterLoads) (Router, error) {
	r, err := newProduct(f, scoring.Config{}, nil)
	if err != nil {
		return nil, err
	}
	p := r.(*product)
	m := &managed{product: p, id: make(map[string]int32), waiters: make(map[string][]*Call), loads: loads}
	spec := pool.PoolSpec{Name: "p", Models: []string{simModel}}
	var list []adapters.Adapter
	for i, name := range p.names[1:] {
		m.id[name] = int32(i + 1)
		list = append(list, adapters.Adapter{Name: name, Source: "/" + name})
		spec.Loadable = append(spec.Loadable, pool.Model{ID: name, Parent: simModel})
	}
	m.planner = adapters.NewPlanner(list, o)
	p.served = &pool.Served{Models: p.served.Models[:1], At: p.served.At}
	p.table.SetPools([]pool.PoolSpec{spec}, p.served.At)
	for _, e := range p.ends {
		p.table.SetServed(e, p.served)
	}
	return m, nil
}

// Route implements Router.
func (m *managed) Route(q *Call, now time.Duration) int {
	if q.Adapter == 0 {
		return m.product.Route(q, now)
	}
	name := m.names[q.Adapter]
	m.planner.Used(name, 1)
	if t := m.table.Load().TargetString(name); len(t.Rows) > 0 {
		return m.product.Route(q, now)
	}
	m.loads.Waited++
	m.waiting++
	m.waiters[name] = append(m.waiters[name], q)
	m.planner.Ask(name, pool.Instant(now))
	m.plan(now)
	return Held
}

// Waiting implements Waiter.
func (m *managed) Waiting() int { return m.waiting }

// Pump implements Waiter.
func (m *managed) Pump(now time.Duration) {
	for len(m.under) > 0 && m.under[0].at <= now {
		u := m.under[0]
		m.under = m.under[1:]
		name := u.action.Adapter.Name
		m.table.AddServed(m.endpoint(u.action.Endpoint), pool.Model{ID: name, Parent: simModel}, pool.Instant(now))
		m.planner.Done(u.action, adapters.NoFault, pool.Instant(now))
		for _, q := range m.waiters[name] {
			m.waiting--
			m.f.send(q, m.product.Route(q, now), now)
		}
		delete(m.waiters, name)
	}
	if now >= m.due {
		m.due = now + planEvery
		m.plan(now)
	}
}

func (m *managed) endpoint(id string) *pool.Endpoint {
	return m.ends[slices.IndexFunc(m.ends, func(e *pool.Endpoint) bool { return e.ID == id })]
}

// plan has the planner decide, and begins what it decides.
func (m *managed) plan(now time.Duration) {
	s := m.table.Load()
	eps := make([]adapters.Endpoint, len(s.Rows))
	for i := range s.Rows {
		r := &s.Rows[i]
		e := &eps[i]
		e.ID, e.Hash, e.Ready, e.Known = r.Endpoint.ID, r.Endpoint.IDHash, true, true
		e.Slots = m.f.Workload.MaxLoras
		for _, sm := range r.Served.Models[1:] {
			e.Has = append(e.Has, sm.ID)
		}
		b := r.Booked()
		e.Busy = min(1, float64(b.PendingTokens)/20_000)
		memory := r.Endpoint.Adapters()
		e.InFlight = func(name string) int {
			u, _ := memory.Use(pool.HashName(name))
			return u.InFlight
		}
	}
	for _, a := range m.planner.Plan(pool.Instant(now), eps) {
		e := m.endpoint(a.Endpoint)
		if a.Unload {
			m.loads.Unloads++
			m.table.RemoveServed(e, a.Adapter.Name, pool.Instant(now))
			cur := m.table.Load()
			m.table.SetServed(e, &pool.Served{Models: cur.Rows[m.row(cur, e)].Served.Models, At: pool.Instant(now)}) // its list says so too
			m.planner.Done(a, adapters.NoFault, pool.Instant(now))
			continue
		}
		if a.Awaited {
			m.loads.Asked++
		} else {
			m.loads.Ahead++
		}
		replica := m.replica[e]
		m.f.Engines[replica].LoadAdapter(m.id[a.Adapter.Name], now)
		u := underWay{now + callTime + sourceLoad, a}
		i := len(m.under)
		for i > 0 && m.under[i-1].at > u.at {
			i--
		}
		m.under = slices.Insert(m.under, i, u)
	}
}

func (m *managed) row(s *pool.Snapshot, e *pool.Endpoint) int {
	return slices.IndexFunc(s.Rows, func(r pool.Row) bool { return r.Endpoint == e })
}
