package gateway

import (
	"fmt"
	"testing"
	"time"

	"go.uber.org/zap"

	"kvgate/pool"
	"kvgate/scoring"
)

func explainable(t *testing.T, endpoints int) (*scoring.Policy, *scoring.Request, *pool.Snapshot) {
	t.Helper()
	table := pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	var specs []pool.Spec
	for i := range endpoints {
		specs = append(specs, pool.Spec{Pool: "p", URL: fmt.Sprintf("http://127.0.0.1:%d", 1000+i)})
	}
	if _, _, err := table.SetEndpoints("p", specs, 1); err != nil {
		t.Fatal(err)
	}
	p, err := scoring.New(scoring.Config{})
	if err != nil {
		t.Fatal(err)
	}
	s := table.Load()
	return p, &scoring.Request{Target: s.TargetString("m"), PromptBytes: 400}, s
}

// However many requests there are, explaining takes no more than its share, and what is kept is bounded.
func TestExplainerKeepsToItsShare(t *testing.T) {
	p, q, s := explainable(t, 40)
	const share = 0.01
	x := newExplainer(share, zap.NewNop())
	first := x.Explain(p, q, s, 2)
	e, ok := x.get(first)
	if first == 0 || !ok || e.Policy != "auto" || len(e.Endpoints) != explainedEndpoints || e.Omitted != 40-explainedEndpoints || !e.Endpoints[0].Chosen {
		t.Fatalf("the first: %d %+v", first, e)
	}
	kept, began := 0, time.Now()
	for time.Since(began) < 300*time.Millisecond {
		if x.Explain(p, q, s, 2) != 0 {
			kept++
		}
	}
	// Each pays for itself with 1/share times what the cheapest took.
	if most := int(share*float64(time.Since(began))/float64(max(1, leastCost(x)))) + 2; kept > most {
		t.Errorf("%d explanations within %v; want at most %d", kept, time.Since(began), most)
	}
	if _, ok := x.get(0); ok {
		t.Error("there is an explanation number 0")
	}
	if _, ok := x.get(first + keptExplanations); ok {
		t.Error("an explanation is there under another number")
	}
}

func leastCost(x *explainer) int64 { return x.cost / 2 }

func TestExplainerOff(t *testing.T) {
	p, q, s := explainable(t, 2)
	x := newExplainer(0, zap.NewNop())
	if n := x.Explain(p, q, s, 2); n != 0 {
		t.Errorf("explained as %d", n)
	}
}
