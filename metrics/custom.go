package metrics

import (
	"errors"
	"fmt"
	"strings"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Custom is the dialect whose series a pool's configuration names.
const Custom = "custom"

// custom holds the name; each pool that uses it compiles its own.
var _ = register(Dialect{
	Name: Custom,
	Doc:  "Any server with a page in the Prometheus format: the pool says which series mean what.",
})

// A Mapping says what the series of a server that no dialect knows mean. Each string names a family, or one of its
// series as in family{label="value"}; "" leaves the number unknown. At least one must be given.
type Mapping struct {
	Path string // of the page (default /metrics)

	Running string // requests in the batch
	Waiting string // requests queued

	KVCacheUtilization string // ratio 0..1; or else the next two
	KVUsed             string // tokens or blocks
	KVTotal            string // in the same unit as KVUsed
	KVCapacityTokens   string // where KVTotal isn't in tokens already
	BlockTokens        int    // tokens per block, if KVUsed and KVTotal count blocks; 0 says that they count tokens

	Adapters      string // a family with a series for each adapter in use or resident, of a value above 0
	AdaptersLabel string // the label that names them, separated by commas if there are several
	MaxAdapters   string // distinct adapters that fit

	EngineLabel string // tells engines on one page apart
}

// compile makes a dialect of m.
func (m *Mapping) compile() (*Dialect, error) {
	var errs []error
	read := func(key, selector string) term {
		if selector == "" {
			return term{}
		}
		t, err := parseSelector(selector)
		if err != nil {
			errs = append(errs, fmt.Errorf("custom: %s: %w", key, err))
		}
		return t
	}
	path := m.Path
	if path == "" {
		path = "/metrics"
	} else if !strings.HasPrefix(path, "/") {
		errs = append(errs, fmt.Errorf("custom: path: %q; want one that begins with /", path))
	}
	d := Dialect{
		Name: Custom, Paths: []string{path}, Model: []string{"model_name", "model"},
		Running: read("running", m.Running),
		Waiting: read("waiting", m.Waiting),
		KVUsage: read("kv_cache_utilization", m.KVCacheUtilization),
	}
	used, total := read("kv_used", m.KVUsed), read("kv_total", m.KVTotal)
	switch {
	case m.KVUsed != "" && m.KVTotal == "":
		errs = append(errs, errors.New("custom: kv_used needs kv_total"))
	case m.KVUsed != "" && m.KVCacheUtilization == "":
		d.KVUsage = ratio(used, total)
	}
	switch {
	case m.BlockTokens < 0:
		errs = append(errs, fmt.Errorf("custom: block_tokens: %d; want 1 or more, or none", m.BlockTokens))
	case m.KVCapacityTokens != "":
		d.KVTokens = read("kv_capacity_tokens", m.KVCapacityTokens)
	case m.KVTotal != "" && m.BlockTokens > 0:
		d.Blocks, d.BlockSize = total, term{op: opConstant, constant: float64(m.BlockTokens)}
	case m.KVTotal != "":
		d.KVTokens = total
	}
	if m.EngineLabel != "" {
		d.Engine = []string{m.EngineLabel}
	}
	d.SlotsTotal = read("max_adapters", m.MaxAdapters)
	if m.Adapters != "" {
		t := read("adapters", m.Adapters)
		if m.AdaptersLabel == "" {
			errs = append(errs, errors.New("custom: adapters needs adapters_label"))
		}
		d.Adapters.Named = []labelOf{{t.family, m.AdaptersLabel}}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	d.compile()
	if len(d.want.names) == 0 {
		return nil, errors.New("custom: no series is named; want running, waiting or one of the kv keys at least")
	}
	return &d, nil
}

// Check reports all that is wrong with m.
func (m *Mapping) Check() error {
	_, err := m.compile()
	return err
}

// parseSelector reads family or family{label="value"}.
func parseSelector(s string) (term, error) {
	p := expfmt.NewTextParser(model.LegacyValidation)
	families, err := p.TextToMetricFamilies(strings.NewReader(s + " 0\n"))
	if err != nil || len(families) != 1 || strings.ContainsAny(s, "\n#") {
		return term{}, fmt.Errorf(`%q is no series; want a name such as queue_size, or queue_size{kind="total"}`, s)
	}
	for name, f := range families {
		t := gauge(name)
		for _, l := range f.Metric[0].Label {
			t.where = append(t.where, label{l.GetName(), l.GetValue()})
		}
		return t, nil
	}
	panic("BUG: one family was parsed, and none is there")
}
