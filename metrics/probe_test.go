package metrics

import (
	"testing"

	"kvgate/pool"
)

func scrapeOnce(t testing.TB, url, dialect string, o Options) (Result, error) {
	t.Helper()
	return probe(t, pool.Spec{URL: url, Dialect: dialect}, o)
}

func probe(t testing.TB, spec pool.Spec, o Options) (Result, error) {
	t.Helper()
	tab := pool.NewTable([]pool.PoolSpec{{Name: "p"}}, pool.Options{})
	spec.Pool = "p"
	es, _, err := tab.SetEndpoints("p", []pool.Spec{spec}, 1)
	if err != nil {
		t.Fatal(err)
	}
	if o.Timeout == 0 {
		o.Timeout = 20e9
	}
	return ScrapeOnce(t.Context(), es[0], o)
}
