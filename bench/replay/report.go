package replay

import (
	"cmp"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
	"time"
)

// A Report is everything that a replay found.
type Report struct {
	Replay      *Replay
	Profile     string // that was asked for
	Calibration *Calibration
	Comparison  *Comparison
	Runs        []*Run
	Want        float64 // of Capacities, 0..1
	Capacities  []*Capacity
}

// close and rough are the factors up to which a simulation is called so.
const (
	closeFactor = 1.25
	roughFactor = 2
)

// verdict says in words how far the simulation is off.
func (c *Comparison) verdict(calibrated *Calibration) string {
	hint := func(s string) string {
		if calibrated != nil {
			return ""
		}
		return s
	}
	switch off := c.Off(); {
	case off == 0:
		return "No streamed answer was recorded, so nothing says how well times to the first token are simulated."
	case off <= closeFactor:
		return fmt.Sprintf("The simulation is close: times to the first token are within a factor of %.2f of what was measured.", off)
	case off <= roughFactor:
		return fmt.Sprintf("The simulation is rough: times to the first token are off by a factor of %.2f. Believe which is better and where it breaks rather than seconds%s.", off, hint("; --calibrate fits the servers"))
	default:
		return fmt.Sprintf("The simulation is far off: times to the first token by a factor of %.1f. %s", off,
			cmp.Or(hint("These are not your servers, or others use them too: choose --profile, or --calibrate, before you believe anything below."),
				"Other speeds don't explain it: others use the servers too, adapters were loaded before the record began, or it is too short."))
	}
}

func ms(d time.Duration) string { return strconv.FormatFloat(d.Seconds()*1e3, 'f', 1, 64) }

func sec(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', 3, 64) }

func ratio(v float64) string {
	if v < 0 {
		return "?"
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

func percent(v float64) string { return strconv.FormatFloat(100*v, 'f', 1, 64) + " %" }

// WriteText writes the report for people.
func (rep *Report) WriteText(out io.Writer) error {
	p := rep.Replay
	r, w := p.r, p.w
	var in, outTokens, streamed int
	for i := range w.Requests {
		in += w.Requests[i].In
		outTokens += w.Requests[i].Out
		if !w.Requests[i].NotStreamed {
			streamed++
		}
	}
	n := len(w.Requests)
	fmt.Fprintf(out, "%s: %d requests", r.Name, n)
	if r.Pool != "" {
		fmt.Fprintf(out, " of pool %s", r.Pool)
	}
	span := w.Requests[n-1].At - w.Requests[0].At
	fmt.Fprintf(out, " in %s", span.Round(time.Second/10))
	if !r.From.IsZero() {
		fmt.Fprintf(out, " from %s", r.From.Format(time.RFC3339))
	}
	fmt.Fprintf(out, ": %.2f requests/s of %d tokens in and %d out on average, %s streamed", w.Rate(), in/n, outTokens/n, percent(float64(streamed)/float64(n)))
	if w.Adapters > 0 {
		fmt.Fprintf(out, ", %d adapters on %d slots", w.Adapters, w.MaxLoras)
	}
	fmt.Fprintln(out)
	note := func(n int, what string) {
		if n > 0 {
			fmt.Fprintf(out, "- %d %s\n", n, what)
		}
	}
	note(r.Failed, "were refused or failed when they were recorded; they are sent all the same")
	note(r.Rejected, "more were wrong in themselves and are left out")
	note(r.Guessed, "have an answer of unknown length: the mean is taken")
	note(p.TooLong, fmt.Sprintf("more fit into no server: their tokens are above its %d of KV cache", p.o.Server.KVTokens))
	if !r.Prefixes {
		fmt.Fprintf(out, "- which prompts begin alike is not known from a %s: nothing is found in prefix caches, and policies that look for it gain nothing\n", r.Kind)
	}
	s := &p.o.Server
	fmt.Fprintf(out, "Servers: %s: %.0f tokens/s of prompts, %s ms per output token alone, KV cache of %d tokens", rep.Profile, s.PrefillRate(), ms(s.TokenTime()), s.KVTokens)
	if c := rep.Calibration; c != nil {
		fmt.Fprintf(out, "; calibrated: prefill takes %.2f times as long as the profile's, decoding %.2f times", c.Prefill, c.Decode)
	}
	fmt.Fprintln(out)
	if p.o.Speed != 1 {
		fmt.Fprintf(out, "Traffic: %g times as fast as recorded, %.2f requests/s\n", p.o.Speed, w.Rate()*p.o.Speed)
	}
	rep.writeComparison(out)
	if err := rep.writeRuns(out); err != nil {
		return err
	}
	rep.writeAnswer(out)
	return nil
}

func (rep *Report) writeComparison(out io.Writer) {
	c := rep.Comparison
	if c == nil {
		if rep.Replay.r.Kind == kindTrace {
			fmt.Fprintln(out, "\nA trace says nothing of how it was served, so nothing says how well it is simulated.")
		} else {
			fmt.Fprintln(out, "\nHow many endpoints served this, or by what policy, is not known (--recorded-replicas), so nothing says how well it is simulated.")
		}
		return
	}
	fmt.Fprintf(out, "\nAs it was recorded: %s on %s\n", c.Policy, endpoints(c.Replicas))
	tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\tTTFT mean s\tp50\tp90\tp99\tTPOT p50 ms\tp99\twhole p50 s\tp99\thit\t")
	line := func(name string, s *Seen) {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", name, sec(s.TTFTMean), sec(s.TTFTP50), sec(s.TTFTP90), sec(s.TTFTP99), ms(s.TPOTP50), ms(s.TPOTP99), sec(s.E2EP50), sec(s.E2EP99), ratio(s.HitRatio))
	}
	line("measured", &c.Measured)
	line("simulated", &c.Simulated)
	_ = tw.Flush()
	fmt.Fprintln(out, c.verdict(rep.Calibration))
}

func endpoints(n int) string {
	if n == 1 {
		return "1 endpoint"
	}
	return strconv.Itoa(n) + " endpoints"
}

func (rep *Report) writeRuns(out io.Writer) error {
	if len(rep.Runs) == 0 {
		return nil
	}
	fmt.Fprintln(out, "\nSimulated")
	tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "policy\tendpoints\tTTFT mean s\tp50\tp90\tp99\tTPOT p99 ms\twithin SLO\thit\tKV mean\tmost\tpreemptions\tadapter loads host/disk\t")
	for _, r := range rep.Runs {
		fmt.Fprintf(tw, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d/%d\t\n", r.Policy, r.Replicas, sec(r.TTFTMean), sec(r.TTFTP50), sec(r.TTFTP90), sec(r.TTFTP99), ms(r.TPOTP99),
			percent(r.Attainment), ratio(r.HitRatio), ratio(r.KVMean), ratio(r.KVMost), r.Preemptions, r.AdapterHostLoads, r.AdapterDiskLoads)
	}
	return tw.Flush()
}

// slo is the SLO in words.
func (rep *Report) slo() string {
	o := &rep.Replay.o
	first, token := "max(2 s, 3 times the prompt's own prefill)", "100ms"
	if o.SLOTTFT > 0 {
		first = o.SLOTTFT.String()
	}
	if o.SLOTPOT > 0 {
		token = o.SLOTPOT.String()
	}
	return "first token within " + first + ", each further one within " + token
}

// writeAnswer says on a line for each policy what was asked.
func (rep *Report) writeAnswer(out io.Writer) {
	fmt.Fprintf(out, "\nSLO: %s\n", rep.slo())
	for i, r := range rep.Runs {
		switch {
		case i > 0 && rep.Runs[i-1].Policy == r.Policy:
			fmt.Fprintf(out, "; %d: %s", r.Replicas, percent(r.Attainment))
		default:
			if i > 0 {
				fmt.Fprintln(out)
			}
			fmt.Fprintf(out, "%s: %s: %s within the SLO", r.Policy, endpoints(r.Replicas), percent(r.Attainment))
		}
	}
	if len(rep.Runs) > 0 {
		fmt.Fprintln(out)
	}
	for _, c := range rep.Capacities {
		switch {
		case c.Replicas == 0:
			fmt.Fprintf(out, "%s: no fleet of up to %s has %s of the requests within the SLO\n", c.Policy, endpoints(maxFleet), percent(rep.Want))
		case c.Replicas == 1:
			fmt.Fprintf(out, "%s: 1 endpoint is enough to have %s within the SLO: %s\n", c.Policy, percent(rep.Want), percent(c.Run.Attainment))
		default:
			fmt.Fprintf(out, "%s: %s are enough to have %s within the SLO: %s; %d: %s\n", c.Policy, endpoints(c.Replicas), percent(rep.Want), percent(c.Run.Attainment), c.Replicas-1, percent(c.Below))
		}
	}
}

// WriteCSV writes a line for each run.
func (rep *Report) WriteCSV(out io.Writer) error {
	c := csv.NewWriter(out)
	if err := c.Write([]string{
		"policy", "endpoints", "rate_rps", "attainment", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p99_s", "e2e_p99_s",
		"hit_ratio", "kv_mean", "kv_most", "preemptions", "adapter_host_loads", "adapter_disk_loads",
	}); err != nil {
		return err
	}
	num := func(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }
	for _, r := range rep.all() {
		if err := c.Write([]string{
			r.Policy, strconv.Itoa(r.Replicas), num(r.Rate), num(r.Attainment), num(r.TTFTMean.Seconds()), num(r.TTFTP50.Seconds()), num(r.TTFTP90.Seconds()), num(r.TTFTP99.Seconds()),
			num(r.TPOTP99.Seconds()), num(r.E2EP99.Seconds()), num(r.HitRatio), num(r.KVMean), num(r.KVMost),
			strconv.FormatUint(r.Preemptions, 10), strconv.FormatUint(r.AdapterHostLoads, 10), strconv.FormatUint(r.AdapterDiskLoads, 10),
		}); err != nil {
			return err
		}
	}
	c.Flush()
	return c.Error()
}

// all are the runs, those on the fleets that were found among them.
func (rep *Report) all() []*Run {
	out := append([]*Run(nil), rep.Runs...)
	for _, c := range rep.Capacities {
		if c.Run != nil {
			out = append(out, c.Run)
		}
	}
	return out
}

type seenJSON struct {
	Requests int      `json:"requests"`
	TTFTMean float64  `json:"ttft_mean_seconds"`
	TTFTP50  float64  `json:"ttft_p50_seconds"`
	TTFTP90  float64  `json:"ttft_p90_seconds"`
	TTFTP99  float64  `json:"ttft_p99_seconds"`
	TPOTP50  float64  `json:"tpot_p50_seconds"`
	TPOTP99  float64  `json:"tpot_p99_seconds"`
	E2EP50   float64  `json:"duration_p50_seconds"`
	E2EP99   float64  `json:"duration_p99_seconds"`
	HitRatio *float64 `json:"hit_ratio"`
}

func (s *Seen) json() seenJSON {
	j := seenJSON{
		Requests: s.Requests, TTFTMean: s.TTFTMean.Seconds(), TTFTP50: s.TTFTP50.Seconds(), TTFTP90: s.TTFTP90.Seconds(), TTFTP99: s.TTFTP99.Seconds(),
		TPOTP50: s.TPOTP50.Seconds(), TPOTP99: s.TPOTP99.Seconds(), E2EP50: s.E2EP50.Seconds(), E2EP99: s.E2EP99.Seconds(),
	}
	if s.HitRatio >= 0 {
		j.HitRatio = &s.HitRatio
	}
	return j
}

type comparisonJSON struct {
	Policy    string   `json:"policy"`
	Endpoints int      `json:"endpoints"`
	Measured  seenJSON `json:"measured"`
	Simulated seenJSON `json:"simulated"`
	OffFactor float64  `json:"ttft_off_factor"`
}

type runJSON struct {
	Policy           string  `json:"policy"`
	Endpoints        int     `json:"endpoints"`
	Rate             float64 `json:"requests_per_second"`
	Attainment       float64 `json:"slo_attainment"`
	TTFTMean         float64 `json:"ttft_mean_seconds"`
	TTFTP50          float64 `json:"ttft_p50_seconds"`
	TTFTP90          float64 `json:"ttft_p90_seconds"`
	TTFTP99          float64 `json:"ttft_p99_seconds"`
	TPOTP99          float64 `json:"tpot_p99_seconds"`
	HitRatio         float64 `json:"hit_ratio"`
	KVMean           float64 `json:"kv_cache_utilization_mean"`
	KVMost           float64 `json:"kv_cache_utilization_max"`
	Preemptions      uint64  `json:"preemptions"`
	AdapterHostLoads uint64  `json:"adapter_host_loads"`
	AdapterDiskLoads uint64  `json:"adapter_disk_loads"`
}

type capacityJSON struct {
	Policy     string  `json:"policy"`
	Want       float64 `json:"want"`
	Endpoints  *int    `json:"endpoints"` // null: no fleet is enough
	OneLess    float64 `json:"slo_attainment_with_one_less"`
	Attainment float64 `json:"slo_attainment"`
}

// WriteJSON writes the report as one JSON object.
func (rep *Report) WriteJSON(out io.Writer) error {
	p := rep.Replay
	var v struct {
		File       string          `json:"file"`
		Kind       string          `json:"kind"`
		Pool       string          `json:"pool"`
		Requests   int             `json:"requests"`
		Rate       float64         `json:"recorded_requests_per_second"`
		Failed     int             `json:"failed"`
		Rejected   int             `json:"left_out"`
		Guessed    int             `json:"guessed_output_lengths"`
		TooLong    int             `json:"too_long"`
		Warnings   []string        `json:"warnings"`
		SLO        string          `json:"slo"`
		Profile    string          `json:"profile"`
		KVTokens   int             `json:"kv_tokens"`
		Calibrated *Calibration    `json:"calibrated"`
		Comparison *comparisonJSON `json:"comparison"`
		Runs       []runJSON       `json:"runs"`
		Capacities []capacityJSON  `json:"capacities"`
	}
	v.File, v.Kind, v.Pool, v.Requests, v.Rate = p.r.Name, p.r.Kind, p.r.Pool, len(p.w.Requests), p.w.Rate()
	v.Failed, v.Rejected, v.Guessed, v.TooLong, v.Warnings = p.r.Failed, p.r.Rejected, p.r.Guessed, p.TooLong, append([]string{}, p.r.Warnings...)
	v.SLO, v.Profile, v.KVTokens, v.Calibrated = rep.slo(), rep.Profile, p.o.Server.KVTokens, rep.Calibration
	if c := rep.Comparison; c != nil {
		v.Comparison = &comparisonJSON{c.Policy, c.Replicas, c.Measured.json(), c.Simulated.json(), c.Off()}
	}
	v.Runs, v.Capacities = []runJSON{}, []capacityJSON{}
	for _, r := range rep.all() {
		v.Runs = append(v.Runs, runJSON{
			r.Policy, r.Replicas, r.Rate, r.Attainment, r.TTFTMean.Seconds(), r.TTFTP50.Seconds(), r.TTFTP90.Seconds(), r.TTFTP99.Seconds(),
			r.TPOTP99.Seconds(), r.HitRatio, r.KVMean, r.KVMost, r.Preemptions, r.AdapterHostLoads, r.AdapterDiskLoads,
		})
	}
	for _, c := range rep.Capacities {
		j := capacityJSON{Policy: c.Policy, Want: rep.Want, OneLess: c.Below}
		if c.Replicas > 0 {
			j.Endpoints, j.Attainment = &c.Replicas, c.Run.Attainment
		}
		v.Capacities = append(v.Capacities, j)
	}
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(&v)
}
