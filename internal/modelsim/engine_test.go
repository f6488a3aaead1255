package modelsim

import (
	"cmp"
	"encoding/csv"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"kvgate/internal/shared"
)

// measured is a request of the ShareGPT sample with what vLLM 0.19 did with it.
type measured struct {
	Request
	at         time.Duration
	ttft, tpot [2]float64 // milliseconds on the RTX PRO 6000 and the RTX 4090
}

func readMeasured(t *testing.T) []*measured {
	t.Helper()
	f, err := os.Open(filepath.Join(shared.Dir(t), "traces", "sharegpt_llama31_300.csv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	var out []*measured
	num := func(s string) float64 {
		v, err := strconv.ParseFloat(s, 64)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	for i, row := range rows[1:] {
		m := &measured{at: time.Duration(num(row[0]) * 1e6)}
		m.ID, m.PromptTokens, m.OutputTokens = uint64(i), int(num(row[1])), int(num(row[2]))
		for run := range strings.FieldsSeq(strings.NewReplacer(";", " ", ",", " ").Replace(row[3])) {
			from, to, ok := strings.Cut(run, "-")
			if !ok {
				to = from
			}
			for id := uint64(num(from)); id <= uint64(num(to)); id++ {
				m.Blocks = append(m.Blocks, id+1)
			}
		}
		m.ttft = [2]float64{num(row[4]), num(row[6])}
		m.tpot = [2]float64{num(row[5]), num(row[7])}
		out = append(out, m)
	}
	return out
}

func quantile(v []float64, q float64) float64 {
	s := slices.Clone(v)
	slices.Sort(s)
	return s[min(len(s)-1, int(q*float64(len(s))))]
}

func mean(v []float64) float64 {
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// The model against what vLLM 0.19 measured: 300 ShareGPT requests on one GPU,
// the last 90 % of them. On the RTX 4090 the KV cache is full most of the time.
func TestEngineMatchesMeasuredVLLM(t *testing.T) {
	run := func(column int, profile string, maxSequences int) {
		t.Helper()
		prof, err := ProfileByName(profile)
		if err != nil {
			t.Fatal(err)
		}
		e, err := NewEngine(EngineOptions{Profile: prof, MaxSequences: maxSequences})
		if err != nil {
			t.Fatal(err)
		}
		reqs := readMeasured(t)
		for _, m := range reqs {
			e.Advance(m.at)
			if err := e.Submit(&m.Request, m.at); err != nil {
				t.Fatal(err)
			}
		}
		e.Advance(math.MaxInt64 / 2)
		var ttft, tpot, wantTTFT, wantTPOT []float64
		slices.SortStableFunc(reqs, func(a, b *measured) int { return cmp.Compare(a.at, b.at) })
		for _, m := range reqs[len(reqs)/10:] {
			if m.State != StateFinished || m.Generated != m.OutputTokens {
				t.Fatalf("request %d: state %d, %d of %d tokens", m.ID, m.State, m.Generated, m.OutputTokens)
			}
			ttft = append(ttft, (m.FirstTokenAt-m.SubmittedAt).Seconds()*1e3)
			tpot = append(tpot, (m.FinishedAt-m.FirstTokenAt).Seconds()*1e3/float64(m.OutputTokens-1))
			wantTTFT = append(wantTTFT, m.ttft[column])
			wantTPOT = append(wantTPOT, m.tpot[column])
		}
		row := func(name string, ttft, tpot []float64) string {
			return fmt.Sprintf("%-20s TTFT mean %6.2f s  p50 %6.2f  p90 %6.2f  p99 %6.2f   TPOT mean %5.1f ms  p99 %5.1f", name,
				mean(ttft)/1e3, quantile(ttft, .5)/1e3, quantile(ttft, .9)/1e3, quantile(ttft, .99)/1e3, mean(tpot), quantile(tpot, .99))
		}
		t.Log(row(profile+" measured", wantTTFT, wantTPOT))
		t.Log(row(profile+" model", ttft, tpot))
		t.Logf("%-20s TTFT %+.1f %%, TPOT %+.1f %%, %d preemptions", "", 100*(mean(ttft)/mean(wantTTFT)-1),
			100*(mean(tpot)/mean(wantTPOT)-1), e.Stats().Preemptions)
		for _, c := range []struct {
			what      string
			got, want float64
		}{{"TTFT", mean(ttft), mean(wantTTFT)}, {"TPOT", mean(tpot), mean(wantTPOT)}} {
			if off := math.Abs(c.got/c.want - 1); off > 0.10 {
				t.Errorf("%s: mean %s %.1f ms; measured %.1f ms; want within 10 %%", profile, c.what, c.got, c.want)
			}
		}
	}
	run(0, "8b-pro6000", 128)
	run(1, "8b-rtx4090", 256)
}
