package metrics

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"kvgate/internal/shared"
)

// sampleTime is when the newest samples were taken, in Unix seconds.
const sampleTime = 1_790_000_000

// readSample reads a file as a page of the named dialect; "" detects it.
func readSample(t testing.TB, path, dialect string) (*page, *Raw) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if strings.HasSuffix(path, ".gz") {
		z, err := gzip.NewReader(bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		if b, err = io.ReadAll(z); err != nil {
			t.Fatal(err)
		}
	}
	return readText(t, string(b), dialect)
}

func readText(t testing.TB, text, dialect string) (*page, *Raw) {
	t.Helper()
	d := Lookup(dialect)
	p := newPage(everyFamily(), nil)
	if d != nil {
		p = newPage(d.want, d)
	}
	if err := p.read(strings.NewReader(text), 4<<20, true); err != nil {
		t.Fatal(err)
	}
	if d == nil {
		return p, nil
	}
	return p, d.raw(p, sampleTime)
}

// columns are the fields of r as the table of samples has them: over all engines.
func columns(r *Raw) map[string]any {
	c := make(map[string]any)
	put := func(key string, combine func(a, b float64) float64, of func(*RawEngine) Value) {
		var total Value
		for i := range r.Engines {
			if v := of(&r.Engines[i]); v.Known && !total.Known {
				total = v
			} else if v.Known {
				total.V = combine(total.V, v.V)
			}
		}
		if total.Known {
			c[key] = total.V
		}
	}
	add := func(a, b float64) float64 { return a + b }
	put("waiting", add, func(e *RawEngine) Value { return e.Waiting })
	put("running", add, func(e *RawEngine) Value { return e.Running })
	put("swapped", add, func(e *RawEngine) Value { return e.Swapped })
	put("deferred", add, func(e *RawEngine) Value { return e.Deferred })
	put("pd_queued", add, func(e *RawEngine) Value { return e.PDQueued })
	put("pending", add, func(e *RawEngine) Value { return e.Pending })
	put("kv_max", math.Max, func(e *RawEngine) Value { return e.KVUsage })
	put("awake", math.Min, func(e *RawEngine) Value { return e.Awake })
	put("block_size", math.Max, func(e *RawEngine) Value { return e.BlockSize })
	put("num_blocks", math.Max, func(e *RawEngine) Value { return e.Blocks })
	put("kv_tokens", math.Max, func(e *RawEngine) Value { return e.KVTokens })
	put("lora_slots_used", math.Max, func(e *RawEngine) Value { return e.SlotsUsed })
	put("lora_slots_total", math.Max, func(e *RawEngine) Value { return e.SlotsTotal })
	var kv, n float64
	for _, e := range r.Engines {
		if e.KVUsage.Known {
			kv, n = kv+e.KVUsage.V, n+1
		}
	}
	if n > 0 {
		c["kv_mean"] = kv / n
	}
	if r.MaxAdapters.Known {
		c["max_lora"] = r.MaxAdapters.V
	}
	if r.AdaptersKnown {
		c["adapters_running"] = append([]string{}, r.AdaptersRunning...)
		c["adapters_waiting"] = append([]string{}, r.AdaptersWaiting...)
	}
	return c
}

// Every sample yields what its row says.
func TestSamples(t *testing.T) {
	dir := filepath.Join(shared.Dir(t), "metrics-samples")
	table, err := os.ReadFile(filepath.Join(dir, "SOURCES.tsv"))
	if err != nil {
		t.Fatal(err)
	}
	var rows [][]string
	for line := range strings.Lines(string(table)) {
		rows = append(rows, strings.Split(strings.TrimRight(line, "\n"), "\t"))
	}
	head := rows[0]
	dialectOf := map[string]string{"sglang_loads": "sglang", "dynamo_fe": "dynamo"}
	// Column of the table to key of columns.
	keys := map[string]string{
		"kv_usage": "kv_max", "waiting": "waiting", "running": "running", "max_adapters": "max_lora",
		"block_size": "block_size", "num_blocks": "num_blocks", "kv_tokens": "kv_tokens",
	}
	checked, detected := 0, 0
	for _, row := range rows[1:] {
		cell := func(name string) string { return row[slices.Index(head, name)] }
		name, server := cell("file"), cell("server")
		if d, ok := dialectOf[server]; ok {
			server = d
		}
		checked++
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, name)
			var raw *Raw
			if server == "json" {
				b, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if raw, err = iterationStats(b); err != nil {
					t.Fatal(err)
				}
			} else {
				_, raw = readSample(t, path, server)
				if p, _ := readSample(t, path, ""); detect(p) != nil {
					detected++
					if got := detect(p).Name; got != server {
						t.Errorf("detected as %s; want %s", got, server)
					}
				} else if p.lines > 1 && len(raw.Engines) > 0 {
					t.Errorf("not detected; want %s", server)
				}
			}
			got := columns(raw)
			for column, key := range keys {
				v, has := got[key]
				want := cell(column)
				if !has && want == "" {
					continue
				}
				w, err := strconv.ParseFloat(want, 64)
				if g, _ := v.(float64); !has || err != nil || math.Abs(g-w) > 1e-12*math.Max(1, w) {
					t.Errorf("%s: got %v (known: %v); want %q", column, v, has, want)
				}
			}
			for column, list := range map[string][]string{"adapters_running": raw.AdaptersRunning, "adapters_waiting": raw.AdaptersWaiting} {
				if g := strings.Join(list, ","); g != cell(column) {
					t.Errorf("%s: got %q; want %q", column, g, cell(column))
				}
			}
			var want map[string]any
			if err := json.Unmarshal([]byte(cell("expected_json")), &want); err != nil {
				t.Fatalf("expected_json: %v", err)
			}
			for key, w := range want {
				g, has := got[key]
				switch w := w.(type) {
				case nil:
					if has {
						t.Errorf("%s: got %v; want unknown", key, g)
					}
				case float64:
					if g, ok := g.(float64); !ok || math.Abs(g-w) > 1e-9 {
						t.Errorf("%s: got %v (known: %v); want %v", key, g, has, w)
					}
				case []any:
					names := []string{}
					for _, n := range w {
						names = append(names, n.(string))
					}
					if g, ok := g.([]string); !ok || !slices.Equal(g, names) {
						t.Errorf("%s: got %v (known: %v); want %v", key, g, has, w)
					}
				default:
					t.Errorf("%s: the table has %T, which this test doesn't compare", key, w)
				}
			}
		})
	}
	t.Logf("%d samples checked, %d of them detected by their families", checked, detected)
	if checked < 59 {
		t.Errorf("%d samples checked; want 59 at least", checked)
	}
}
