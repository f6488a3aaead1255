// Package replay plays recorded traffic in the simulator of bench/policies: what a gateway recorded, with other policies,
// fleets, servers or more traffic than there was. It says how far the simulation is from what was measured, so that one knows
// how much to believe of the rest.
//
// It must not be imported by the product's packages.
package replay

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvgate/bench/policies"
	"kvgate/internal/record"
	"kvgate/internal/usage"
	"kvgate/scoring"
)

// ReadOptions say which part of a record is wanted.
type ReadOptions struct {
	Pool     string        // "": the only one
	From     time.Time     // zero: from the beginning
	For      time.Duration // 0: to the end
	Busiest  time.Duration // the time of this length with the most tokens; 0: everything
	Requests int           // that are taken at most; default DefaultRequests

	// Of traces without a clock: TraceBlock is how many tokens a block id stands for (0: as the file says, 512 where it doesn't),
	// and TraceSpread over what time arrivals that have one stamp are spread.
	TraceBlock  int
	TraceSpread time.Duration
	Seed        uint64
}

// DefaultRequests is how many requests are taken at most: what a gigabyte of memory is enough for.
const DefaultRequests = 200_000

// A Measured is how a request was really served. Zero fields are not known.
type Measured struct {
	TTFT, TPOT, E2E time.Duration
	In, Cached      int64 // prompt tokens, and those from the prefix cache; Cached is -1 if that is not known
	Failed          bool  // it was refused, or ended in an error
}

// A Recording is traffic to be replayed, and how it was served.
type Recording struct {
	Name, Kind string // Kind is record, usage or trace
	Pool       string // "" for traces
	From, To   time.Time
	Workload   *policies.Workload
	Measured   []Measured // of Workload.Requests; nil for traces
	// Fleet is what served most of the requests; its Endpoints are 0 where nobody knows.
	Fleet    record.Fleet
	Failed   int // requests that were refused or ended in an error, and are demand all the same
	Rejected int // requests that were wrong, and are left out
	Guessed  int // requests whose output length is not known and was set to the mean
	Prefixes bool
	Warnings []string
}

// Read reads files: records, or usage records, or one trace.
func Read(files []string, o ReadOptions) (*Recording, error) {
	o.Requests = cmp.Or(o.Requests, DefaultRequests)
	first, kind, err := sniff(files[0])
	if err != nil {
		return nil, err
	}
	for _, f := range files[1:] {
		if _, k, err := sniff(f); err != nil {
			return nil, err
		} else if k != kind {
			return nil, fmt.Errorf("%s is a %s and %s a %s; want files of one kind", files[0], kind, f, k)
		}
	}
	switch kind {
	case kindRecord:
		return readLines(files, o, kind, scanRecord)
	case kindUsage:
		return readLines(files, o, kind, scanUsage)
	}
	if len(files) > 1 {
		return nil, fmt.Errorf("%s is a trace; want it alone", files[0])
	}
	return readTrace(files[0], first, o)
}

// Kinds of files.
const (
	kindRecord = "record"
	kindUsage  = "usage record"
	kindTrace  = "trace"
)

// sniff returns the first line of a file, and what kind of a file that makes it.
func sniff(name string) (first, kind string, err error) {
	f, err := os.Open(name)
	if err != nil {
		return "", "", err
	}
	defer f.Close()
	in := bufio.NewReader(io.LimitReader(f, 1<<20))
	for {
		first, err = in.ReadString('\n')
		if t := strings.TrimSpace(first); t != "" {
			first = t
			break
		}
		if err != nil {
			if err != io.EOF {
				return "", "", fmt.Errorf("%s: %w", name, err)
			}
			return "", "", fmt.Errorf("%s: the file is empty; want a record: name it in record.file of the configuration and let requests come", name)
		}
	}
	var keys map[string]json.RawMessage
	switch {
	case strings.HasPrefix(first, "t_ms,in,out"):
		return first, kindTrace, nil
	case strings.HasPrefix(first, `{"kvgate_record":`):
		return first, kindRecord, nil
	case json.Unmarshal([]byte(first), &keys) != nil:
	case keys["timestamp"] != nil && keys["input_length"] != nil:
		return first, kindTrace, nil
	case keys["request_id"] != nil && keys["served_model"] != nil:
		return first, kindUsage, nil
	}
	return "", "", fmt.Errorf("%s:1: it begins %.40q; want a record of kvgate serve (record.file), its usage records (usage.file), or a trace: CSV with the columns t_ms,in,out[,blocks], or JSON lines with timestamp, input_length, output_length and hash_ids", name, first)
}

// scanRecord calls fn for each request of a record, with what served its pool.
func scanRecord(name string, fn func(l *record.Line, h *record.Header, fleets []record.Fleet) error) (warnings []string, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := record.NewReader(f, name)
	for {
		var l record.Line
		if err := r.Next(&l); errors.Is(err, io.EOF) {
			return r.Warnings, nil
		} else if err != nil {
			return r.Warnings, err
		}
		if err := fn(&l, r.Header(), r.Fleets()); err != nil {
			return r.Warnings, err
		}
	}
}

// scanUsage calls fn for each request of usage records, which tell less.
func scanUsage(name string, fn func(l *record.Line, h *record.Header, fleets []record.Fleet) error) (warnings []string, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	in := bufio.NewReaderSize(f, 64<<10)
	header := &record.Header{Version: record.Version}
	for n := 1; ; n++ {
		text, err := in.ReadBytes('\n')
		if len(bytes.TrimSpace(text)) > 0 {
			var u usage.Line
			if bad := json.Unmarshal(text, &u); bad != nil {
				if err == io.EOF { // it was being written
					return append(warnings, fmt.Sprintf("%s:%d: the line was cut off in writing; it is left out", name, n)), nil
				}
				return nil, fmt.Errorf("%s:%d: not a usage record: %w; remove the line, or copy the file anew", name, n, bad)
			}
			l := record.Line{
				At:   float64(u.Time.UnixMicro())/1e6 - u.DurationSeconds,
				Pool: u.Pool, Model: u.Served, Adapter: u.Adapter != "", API: u.API, Stream: u.Stream, Estimated: true, Tenant: u.Tenant,
				QueueSeconds: u.QueueSeconds, TTFTSeconds: u.TTFTSeconds, DurationSeconds: u.DurationSeconds, Status: u.Status, Outcome: u.Outcome, CachedTokens: -1,
			}
			if u.InputTokens != nil && u.OutputTokens != nil {
				l.InputTokens, l.OutputTokens, l.Estimated = *u.InputTokens, *u.OutputTokens, false
				if u.CachedTokens != nil {
					l.CachedTokens = *u.CachedTokens
				}
			}
			if bad := l.Check(); bad != nil {
				return nil, fmt.Errorf("%s:%d: %w; remove the line, or copy the file anew", name, n, bad)
			}
			if err := fn(&l, header, nil); err != nil {
				return warnings, err
			}
		}
		if err == io.EOF {
			return warnings, nil
		}
		if err != nil {
			return warnings, fmt.Errorf("%s: %w", name, err)
		}
	}
}

type scan func(name string, fn func(l *record.Line, h *record.Header, fleets []record.Fleet) error) ([]string, error)

// A stamp is what the choice of a part needs of a request.
type stamp struct {
	at     float64
	tokens int64
}

// readLines reads records twice: to find the part that is wanted, and to take that.
func readLines(files []string, o ReadOptions, kind string, scan scan) (*Recording, error) {
	r := &Recording{Name: filepath.Base(files[0]), Kind: kind}
	pools := map[string]int{}
	stamps := map[string][]stamp{}
	for _, f := range files {
		warnings, err := scan(f, func(l *record.Line, _ *record.Header, _ []record.Fleet) error {
			pools[l.Pool]++
			stamps[l.Pool] = append(stamps[l.Pool], stamp{l.At, l.InputTokens + l.OutputTokens})
			return nil
		})
		if err != nil {
			return nil, err
		}
		r.Warnings = append(r.Warnings, warnings...)
	}
	var err error
	if r.Pool, err = onePool(files[0], pools, o.Pool); err != nil {
		return nil, err
	}
	from, to, err := part(stamps[r.Pool], o)
	if err != nil {
		return nil, fmt.Errorf("%s: pool %s: %w", files[0], r.Pool, err)
	}
	b := newBuilder(r)
	for _, f := range files {
		_, err := scan(f, func(l *record.Line, h *record.Header, fleets []record.Fleet) error {
			if l.Pool == r.Pool && l.At >= from && l.At <= to {
				b.take(l, h, fleets)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return r, b.finish()
}

func onePool(file string, pools map[string]int, want string) (string, error) {
	var names, list []string
	for name := range pools {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		list = append(list, fmt.Sprintf("%s (%d requests)", name, pools[name]))
	}
	switch {
	case len(names) == 0:
		return "", fmt.Errorf("%s: no request is recorded", file)
	case want == "" && len(names) == 1:
		return names[0], nil
	case want == "":
		return "", fmt.Errorf("%s: requests of several pools are recorded: %s; choose one with --pool", file, strings.Join(list, ", "))
	case pools[want] == 0:
		return "", fmt.Errorf("%s: pool %q: no request of it is recorded; there are %s", file, want, strings.Join(list, ", "))
	}
	return want, nil
}

// part is from when to when requests are wanted.
func part(s []stamp, o ReadOptions) (from, to float64, err error) {
	slices.SortFunc(s, func(a, b stamp) int { return cmp.Compare(a.at, b.at) })
	from, to = s[0].at, s[len(s)-1].at
	first, last := clock(from), clock(to)
	if !o.From.IsZero() {
		from = max(from, float64(o.From.UnixMicro())/1e6)
	}
	if o.For > 0 {
		to = min(to, from+o.For.Seconds())
	}
	if o.Busiest > 0 {
		from, to = busiest(s, from, to, o.Busiest.Seconds())
	}
	n := 0
	for _, v := range s {
		if v.at >= from && v.at <= to {
			n++
		}
	}
	switch {
	case n < 2:
		return 0, 0, fmt.Errorf("%d requests from %s to %s; want two at least; the record goes from %s to %s", n, clock(from), clock(to), first, last)
	case n > o.Requests:
		return 0, 0, fmt.Errorf("%d requests from %s to %s; %d are replayed at most: take a part with --busiest 1h, or --from and --for, or raise --max-requests", n, clock(from), clock(to), o.Requests)
	}
	return from, to, nil
}

func clock(at float64) string { return time.Unix(int64(at), 0).UTC().Format(time.RFC3339) }

// busiest is the part between from and to of that length that has the most tokens.
func busiest(s []stamp, from, to, seconds float64) (float64, float64) {
	var best, sum int64 = -1, 0
	bestAt, j := from, 0
	for i := range s {
		if s[i].at < from || s[i].at > to {
			j = i + 1
			sum = 0
			continue
		}
		sum += s[i].tokens
		for s[j].at < s[i].at-seconds {
			sum -= s[j].tokens
			j++
		}
		if sum > best {
			best, bestAt = sum, s[j].at
		}
	}
	return bestAt, min(to, bestAt+seconds)
}

// A builder makes a workload of lines.
type builder struct {
	r        *Recording
	items    []item
	adapters map[string]int32
	sessions map[string]uint64
	nodes    map[uint64]float64 // end of each block, in tokens
	fleets   map[record.Fleet]int
	ids      []uint64
	outs     int64 // tokens, of the known
	known    int
}

type item struct {
	request  policies.Request
	measured Measured
	at       float64
	guess    bool
	window   float64 // length of the windows of sampling, 0 without
}

// blockTokens is how finely prefixes are told apart: the gateway's finest block is about as long.
const blockTokens = 64

func newBuilder(r *Recording) *builder {
	return &builder{r: r, adapters: map[string]int32{}, sessions: map[string]uint64{}, nodes: map[uint64]float64{}, fleets: map[record.Fleet]int{}}
}

// noLoad reports whether the request was wrong in itself: it would be so again, and costs nobody anything.
func noLoad(l *record.Line) bool {
	switch l.Outcome {
	case "saturated", "queue_timeout", "client_gone":
		return false
	}
	return l.Status >= 400 && l.Status < 500 && l.Status != 429 && l.Status != 499 || l.Outcome == "quota"
}

func (b *builder) take(l *record.Line, h *record.Header, fleets []record.Fleet) {
	if noLoad(l) {
		b.r.Rejected++
		return
	}
	it := item{at: l.At, guess: l.Estimated}
	if h.Sample > 0 && h.Sample < 1 {
		it.window = h.WindowSeconds
	}
	q := &it.request
	q.In = max(1, int(l.InputTokens))
	if l.InputTokens == 0 && l.PromptBytes > 0 {
		q.In = int(l.PromptBytes/4) + 1
	}
	q.Out, q.MaxTokens, q.NotStreamed, q.Tenant = int(l.OutputTokens), int(min(l.MaxTokens, 1<<20)), !l.Stream, l.Tenant
	if l.Adapter {
		id, ok := b.adapters[l.Model]
		if !ok {
			id = int32(len(b.adapters) + 1)
			b.adapters[l.Model] = id
		}
		q.Adapter = id
	}
	if l.Session != "" {
		id, ok := b.sessions[l.Session]
		if !ok {
			id = policies.BlockID(uint64(len(b.sessions)+1), 0x73657373)
			b.sessions[l.Session] = id
		}
		q.Session = id
	}
	q.Blocks = b.blocks(l, q.In)
	b.r.Prefixes = b.r.Prefixes || len(l.Blocks) > 0

	m := &it.measured
	*m = Measured{E2E: seconds(l.DurationSeconds), Cached: -1, Failed: l.Outcome != "ok"}
	if m.Failed {
		b.r.Failed++
	}
	if l.Stream {
		m.TTFT = seconds(l.TTFTSeconds)
	}
	if !l.Estimated {
		m.In, m.Cached = l.InputTokens, l.CachedTokens
		b.outs += l.OutputTokens
		b.known++
		if m.TTFT > 0 && l.OutputTokens > 1 {
			m.TPOT = (m.E2E - m.TTFT) / time.Duration(l.OutputTokens-1)
		}
	}
	for i := range fleets {
		if fleets[i].Pool == l.Pool {
			b.fleets[fleets[i]]++
		}
	}
	b.items = append(b.items, it)
}

// blocks cuts the prompt's blocks of bytes into blocks of tokens. Where a block of bytes ends in tokens is decided by the first
// prompt that has it: those that share it share the same tokens.
func (b *builder) blocks(l *record.Line, in int) []uint64 {
	if l.PromptBytes == 0 {
		return nil
	}
	b.ids = l.BlockIDs(b.ids[:0])
	if len(b.ids) == 0 {
		return nil
	}
	out := make([]uint64, 0, in/blockTokens)
	end := 0.0
	for k, id := range b.ids {
		from, to := scoring.PrefixBytes(k), scoring.PrefixBytes(k+1)
		e, ok := b.nodes[id]
		if !ok {
			rate := float64(in) / float64(l.PromptBytes)
			if left, bytes := float64(in)-end, l.PromptBytes-int64(from); left > 0 && bytes >= int64(to-from) {
				rate = left / float64(bytes)
			}
			e = end + rate*float64(to-from)
			b.nodes[id] = e
		}
		end = e
		for n := uint64(0); len(out) < in/blockTokens && float64((len(out)+1)*blockTokens) <= end; n++ {
			out = append(out, policies.BlockID(id, n))
		}
	}
	return out
}

func seconds(s float64) time.Duration { return time.Duration(s * 1e9) }

// finish sorts what was taken and completes the recording.
func (b *builder) finish() error {
	r := b.r
	if len(b.items) < 2 {
		return fmt.Errorf("%s: pool %s: %d requests, and %d that were wrong and are left out; want two at least", r.Name, r.Pool, len(b.items), r.Rejected)
	}
	slices.SortStableFunc(b.items, func(a, c item) int { return cmp.Compare(a.at, c.at) })
	mean := 256
	if b.known > 0 {
		mean = max(1, int(b.outs/int64(b.known)))
	}
	w := &policies.Workload{Name: r.Name, BlockTokens: blockTokens, Adapters: len(b.adapters)}
	first, cut := b.items[0].at, 0.0
	r.From, r.To = time.UnixMicro(int64(first*1e6)).UTC(), time.UnixMicro(int64(b.items[len(b.items)-1].at*1e6)).UTC()
	for i := range b.items {
		it := &b.items[i]
		if i > 0 && it.window > 0 {
			// What lies between two windows was not recorded.
			if skipped := math.Floor(it.at/it.window) - math.Floor(b.items[i-1].at/it.window) - 1; skipped > 0 {
				cut += skipped * it.window
			}
		}
		it.request.At = seconds(it.at - first - cut)
		if it.guess {
			r.Guessed++
			if it.request.Out = mean; it.request.MaxTokens > 0 {
				it.request.Out = min(mean, it.request.MaxTokens)
			}
		}
		it.request.Out = max(1, it.request.Out)
		w.Requests = append(w.Requests, it.request)
		r.Measured = append(r.Measured, it.measured)
	}
	if w.Requests[len(w.Requests)-1].At <= 0 {
		return fmt.Errorf("%s: pool %s: all requests came at once; want some time between the first and the last", r.Name, r.Pool)
	}
	r.Workload = w
	best := 0
	for f, n := range b.fleets {
		if n > best || n == best && f.Endpoints > r.Fleet.Endpoints {
			best, r.Fleet = n, f
		}
	}
	low, high := r.Fleet.Endpoints, r.Fleet.Endpoints
	for f := range b.fleets {
		low, high = min(low, f.Endpoints), max(high, f.Endpoints)
	}
	if low != high {
		r.Warnings = append(r.Warnings, fmt.Sprintf("there were %d to %d endpoints while this was recorded; %d for most requests", low, high, r.Fleet.Endpoints))
	}
	return nil
}

// readTrace reads a public trace, which tells nothing of how it was served.
func readTrace(name, first string, o ReadOptions) (*Recording, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := &Recording{Name: filepath.Base(name), Kind: kindTrace}
	block := o.TraceBlock
	rnd := rand.New(rand.NewPCG(o.Seed, 0x7472616365))
	var in io.Reader = f
	if strings.HasPrefix(first, "{") {
		if in, err = asCSV(f, name); err != nil {
			return nil, err
		}
		first = "t_ms,in,out,blocks"
	}
	if columns := strings.Split(first, ","); block == 0 && len(columns) > 3 {
		block = 512
		if n, err := strconv.Atoi(strings.TrimPrefix(columns[3], "blocks")); err == nil {
			block = n
		}
	}
	if block%16 != 0 || block > 0 && block < blockTokens && blockTokens%block != 0 || block > blockTokens && block%blockTokens != 0 {
		return nil, fmt.Errorf("%s: blocks of %d tokens; want 16, 32 or a multiple of 64: --trace-block 512", name, block)
	}
	if r.Workload, err = policies.ReadTrace(in, name, block, o.TraceSpread, rnd); err != nil {
		return nil, err
	}
	r.Workload.Name = r.Name
	r.Prefixes = block > 0
	w := r.Workload
	if o.For > 0 {
		w.Requests = w.Requests[:sortSearch(w.Requests, o.For)]
	}
	switch n := len(w.Requests); {
	case n < 2 || w.Requests[n-1].At <= 0:
		return nil, fmt.Errorf("%s: %d requests; want two at least, and some time between the first and the last", name, n)
	case n > o.Requests:
		return nil, fmt.Errorf("%s: %d requests; %d are replayed at most: take a part with --for 1h, or raise --max-requests", name, n, o.Requests)
	}
	return r, nil
}

// sortSearch is how many of the requests come before d.
func sortSearch(q []policies.Request, d time.Duration) int {
	n, _ := slices.BinarySearchFunc(q, d, func(r policies.Request, d time.Duration) int { return cmp.Compare(r.At, d) })
	return n
}

// asCSV turns a trace in Mooncake's own format (FAST25-release/traces of its repository) into one that policies reads.
func asCSV(f io.Reader, name string) (io.Reader, error) {
	var out bytes.Buffer
	out.WriteString("t_ms,in,out,blocks\n")
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 4<<20)
	for n := 1; sc.Scan(); n++ {
		if len(bytes.TrimSpace(sc.Bytes())) == 0 {
			continue
		}
		var l struct {
			Timestamp float64
			In        int      `json:"input_length"`
			Out       int      `json:"output_length"`
			Blocks    []uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(sc.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("%s:%d: %w; want timestamp, input_length, output_length and hash_ids", name, n, err)
		}
		fmt.Fprintf(&out, "%g,%d,%d,", l.Timestamp, l.In, l.Out)
		for _, id := range l.Blocks {
			fmt.Fprintf(&out, "%d ", id)
		}
		out.WriteByte('\n')
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &out, nil
}
