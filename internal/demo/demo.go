// Package demo shows kvgate at work where there is no GPU: four simulated model servers and the real gateway on loopback
// sockets, the same traffic under two policies, and a table of what became of it. It must not import cli.
package demo

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"kvgate/config"
	"kvgate/internal/gateway"
	"kvgate/internal/modelsim"
	"kvgate/telemetry"
)

// Options configure [Run]. The zero value is the demo of the README.
type Options struct {
	Out   io.Writer // required
	Color bool      // Out is a terminal that shows colours
	Width int       // columns of Out, to cut long lines at; 0 cuts none
	Self  string    // how the program is called in commands to try; default kvgate

	Verbose   bool          // show every request, not some 20 of each policy
	Length    time.Duration // of the traffic under each policy; default 15s
	PerSecond float64       // requests; default 6
	Seed      uint64        // other traffic; default 1
	Policies  []string      // default round_robin and auto

	// Keep serves on with the last policy until the context ends, on these addresses where they are free.
	Keep              bool
	Listen, AdminAddr string
}

// A Summary is what became of the traffic under one policy.
type Summary struct {
	Policy                      string
	Requests, Failed            int
	TTFTMean, TTFTP50, TTFTP99  time.Duration // as the clients saw it
	Preemptions, AdapterLoads   uint64        // on all servers
	PrefillTokens, CachedTokens uint64
	Hint                        string // why requests failed, if any did
}

// shown is about how many requests of a policy are shown: more would bury the table at the end.
const shown = 20

// patience is how long after the last request was sent the answers may take: a machine that has no time to spare for four
// simulated servers must not make the demo endless.
const patience = 12 * time.Second

// Run shows the demo and returns what it measured, in the order of Options.Policies.
func Run(ctx context.Context, o Options) ([]Summary, error) {
	o.Length = cmp.Or(o.Length, 15*time.Second)
	o.PerSecond = cmp.Or(o.PerSecond, 6)
	o.Seed = cmp.Or(o.Seed, 1)
	if o.Policies == nil {
		o.Policies = []string{"round_robin", "auto"}
	}
	d := &show{o: o, paint: paint(o.Color)}
	traffic := calls(o.Seed, o.Length, o.PerSecond)
	d.intro(len(traffic))
	var sums []Summary
	for i, policy := range o.Policies {
		last := i == len(o.Policies)-1
		s, err := d.policy(ctx, policy, traffic, last && o.Keep, func(s Summary) {
			if last {
				d.table(append(slices.Clone(sums), s))
			}
		})
		if err != nil {
			return sums, fmt.Errorf("policy %s: %w", policy, err)
		}
		sums = append(sums, s)
	}
	return sums, nil
}

type show struct {
	o     Options
	paint paint
}

func (d *show) print(format string, args ...any) { fmt.Fprintf(d.o.Out, format, args...) }

func (d *show) intro(requests int) {
	d.print("%s\n\n", d.paint.bold("kvgate demo: four simulated GPU servers, the real gateway, real sockets, real time"))
	for _, g := range fleet(0) {
		about := g.options.Models[0]
		switch {
		case g.fill > 0:
			about += fmt.Sprintf(", %.0f%% of its KV cache kept full by others", 100*g.fill)
		case len(g.options.Adapters) > 0:
			about += fmt.Sprintf(", %d adapters, %d fit at a time", len(g.options.Adapters), g.options.MaxLoras)
		}
		d.print("  %-8s %s\n", g.name, about)
	}
	d.print("\n%d chat requests in %s, the same ones at the same times under each policy: %s.\n", requests, d.o.Length, strings.Join(d.o.Policies, ", then "))
}

// policy runs the traffic under one policy on a fresh fleet. With keep it serves on after done until ctx ends.
func (d *show) policy(ctx context.Context, policy string, traffic []call, keep bool, done func(Summary)) (Summary, error) {
	sum := Summary{Policy: policy, Requests: len(traffic)}
	var servers []*modelsim.Server
	defer func() {
		wait, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		for _, s := range servers {
			_ = s.Close(wait)
		}
	}()
	gpus := fleet(d.o.Seed)
	for i := range gpus {
		s, err := modelsim.New(gpus[i].options)
		if err != nil {
			return sum, err
		}
		servers = append(servers, s)
		if err := s.Fill(gpus[i].fill); err != nil {
			return sum, err
		}
	}
	listen, adminAddr := "127.0.0.1:0", "127.0.0.1:0"
	if keep {
		listen, adminAddr = free(d.o.Listen), free(d.o.AdminAddr)
	}
	cfg, err := config.Parse("demo.yaml", []byte(fleetConfig(policy, listen, adminAddr, gpus, servers)), gateway.ConfigOptions())
	if err != nil {
		return sum, err
	}
	live := &live{show: d, every: 1, sent: make(map[string]time.Duration), names: make(map[string]string)}
	if !d.o.Verbose {
		live.every = (len(traffic) + shown - 1) / shown
	}
	for i := 0; i < len(traffic); i += max(live.every, 1) { // the same ones under each policy
		live.sent[traffic[i].id] = traffic[i].at
	}
	for i, s := range servers {
		live.names[gpus[i].pool+"/"+s.Addr()] = gpus[i].name
	}
	gw, err := gateway.New(cfg, gateway.Options{LogOutput: io.Discard, Sink: live})
	if err != nil {
		return sum, err
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		_, err := gw.Run(running)
		ended <- err
	}()
	defer func() {
		stop()
		if ended != nil {
			<-ended
		}
	}()
	select {
	case <-gw.Ready():
	case err := <-ended:
		ended = nil
		return sum, errors.Join(err, ctx.Err())
	}
	d.print("\n%s\n", d.paint.bold("policy "+policy))
	live.header(len(traffic))
	before := make([]modelsim.Stats, len(servers))
	for i, s := range servers {
		before[i] = s.Stats().Engine
	}
	d.traffic(ctx, "http://"+gw.Addr(), traffic, &sum)
	if ctx.Err() != nil {
		return sum, ctx.Err()
	}
	for i, s := range servers {
		st, was := s.Stats().Engine, before[i]
		sum.Preemptions += st.Preemptions - was.Preemptions
		sum.AdapterLoads += st.AdapterHostLoads + st.AdapterDiskLoads - was.AdapterHostLoads - was.AdapterDiskLoads
		sum.PrefillTokens += st.PrefillTokens - was.PrefillTokens
		sum.CachedTokens += st.PrefixHitTokens - was.PrefixHitTokens
	}
	done(sum)
	if keep {
		d.keep(gw)
		select {
		case <-ctx.Done():
		case err := <-ended:
			ended = nil
			return sum, err
		}
	}
	return sum, nil
}

// free is addr, or any port where it is taken.
func free(addr string) string {
	if ln, err := net.Listen("tcp", addr); err == nil {
		_ = ln.Close()
		return addr
	}
	return "127.0.0.1:0"
}

func fleetConfig(policy, listen, adminAddr string, gpus []gpu, servers []*modelsim.Server) string {
	var b strings.Builder
	fmt.Fprintf(&b, "listen: %q\nadmin: {listen: %q}\ndrain: {delay: 0s, timeout: 1s}\nlog: {access: \"off\"}\npools:\n", listen, adminAddr)
	for _, p := range []string{"llama", "qwen"} {
		fmt.Fprintf(&b, "  - name: %s\n    policy: %s\n    discovery:\n      static:\n", p, policy)
		for i, s := range servers {
			if gpus[i].pool == p {
				fmt.Fprintf(&b, "        - %s\n", s.URL())
			}
		}
	}
	return b.String()
}

// traffic sends every call at its time and waits for the answers.
func (d *show) traffic(ctx context.Context, url string, traffic []call, sum *Summary) {
	transport := &http.Transport{MaxIdleConnsPerHost: 256}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	ttft := make([]time.Duration, len(traffic))
	errs := make([]error, len(traffic))
	var wg sync.WaitGroup
	began := time.Now()
	parent := ctx
	ctx, cancel := context.WithDeadlineCause(ctx, began.Add(d.o.Length+patience), fmt.Errorf("no answer %s after the last request; is the machine busy?", patience))
	defer cancel()
	for i := range traffic {
		t := time.NewTimer(time.Until(began.Add(traffic[i].at)))
		select {
		case <-t.C:
		case <-parent.Done():
			t.Stop()
			wg.Wait()
			return
		}
		wg.Go(func() { ttft[i], errs[i] = ask(ctx, client, url, &traffic[i]) })
	}
	wg.Wait()
	var good []time.Duration
	for i := range traffic {
		if errs[i] != nil {
			sum.Failed++
			sum.Hint = errs[i].Error()
			if errors.Is(errs[i], context.DeadlineExceeded) && context.Cause(ctx) != nil {
				sum.Hint = context.Cause(ctx).Error()
			}
			continue
		}
		good = append(good, ttft[i])
		sum.TTFTMean += ttft[i]
	}
	if len(good) == 0 {
		return
	}
	sum.TTFTMean /= time.Duration(len(good))
	slices.Sort(good)
	sum.TTFTP50, sum.TTFTP99 = good[(len(good)-1)/2], good[(len(good)*99+99)/100-1]
}

// ask makes one streamed request and returns the time to its first event.
func ask(ctx context.Context, client *http.Client, url string, c *call) (ttft time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(c.body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", c.id)
	began := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		return 0, fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	complete := false
	for lines := bufio.NewScanner(resp.Body); ; {
		if !lines.Scan() {
			if err := lines.Err(); err != nil {
				return ttft, err
			}
			break
		}
		if !bytes.HasPrefix(lines.Bytes(), []byte("data:")) {
			continue
		}
		if ttft == 0 {
			ttft = time.Since(began)
		}
		complete = bytes.Equal(lines.Bytes(), []byte("data: [DONE]"))
	}
	if !complete {
		return ttft, errors.New("the answer was cut off")
	}
	return ttft, nil
}

func (d *show) table(sums []Summary) {
	d.print("\n%s\n", d.paint.bold("Same requests, same times, fresh servers:"))
	d.print(`
  TTFT            time to the first token, as the client saw it: mean, median, and what one request in a hundred exceeds
  preemptions     requests that a server threw out of its full KV cache and began again
  adapter loads   times that a server loaded a LoRA adapter while a request for it waited
  prompt cached   share of the prompts' tokens whose KV was still in a server's cache and was not computed again

`)
	tw := tabwriter.NewWriter(d.o.Out, 0, 0, 3, ' ', tabwriter.AlignRight)
	// The first column is text: padded here, so that it stays on the left.
	width := len("policy")
	for _, s := range sums {
		width = max(width, len(s.Policy))
	}
	fmt.Fprintln(tw, fmt.Sprintf("%-*s", width, "policy")+"\trequests\tfailed\tTTFT mean\tTTFT p50\tTTFT p99\tpreemptions\tadapter loads\tprompt cached\t")
	for _, s := range sums {
		cached := 100 * float64(s.CachedTokens) / float64(max(1, s.CachedTokens+s.PrefillTokens))
		fmt.Fprintf(tw, "%s\t%d\t%d\t%s\t%s\t%s\t%d\t%d\t%.0f%%\t\n", fmt.Sprintf("%-*s", width, s.Policy), s.Requests, s.Failed,
			seconds(s.TTFTMean), seconds(s.TTFTP50), seconds(s.TTFTP99), s.Preemptions, s.AdapterLoads, cached)
	}
	tw.Flush()
	for _, s := range sums {
		if s.Hint != "" {
			d.print("%s: a request failed: %s\n", s.Policy, s.Hint)
		}
	}
	if a, b := sums[0], sums[len(sums)-1]; len(sums) > 1 && b.TTFTMean > 0 && b.TTFTP99 > 0 {
		d.print("\n%s waits %.1f times as long for the first token as %s on average, %.1f times at p99.\n",
			a.Policy, float64(a.TTFTMean)/float64(b.TTFTMean), b.Policy, float64(a.TTFTP99)/float64(b.TTFTP99))
		d.print("%s\n", whence(a, b))
		if a.Policy == "round_robin" && !slices.ContainsFunc(sums, func(s Summary) bool { return s.Policy == "least_requests" }) {
			d.print("Round robin is easily beaten; for a fairer comparison: %s demo --policy least_requests,auto\n", cmp.Or(d.o.Self, "kvgate"))
		}
	}
}

// whence says in what the servers' work under b differed from that under a, which is where the first tokens' waiting went.
func whence(a, b Summary) string {
	cached := func(s Summary) string {
		return fmt.Sprintf("%.0f%%", 100*float64(s.CachedTokens)/float64(max(1, s.CachedTokens+s.PrefillTokens)))
	}
	computed := func(s Summary) float64 { return float64(s.PrefillTokens) / 1000 }
	return fmt.Sprintf("Where it comes from, %s against %s: %d adapter loads against %d, %d preemptions against %d, "+
		"%.0f thousand prompt tokens computed against %.0f (%s of all against %s were cached).",
		b.Policy, a.Policy, b.AdapterLoads, a.AdapterLoads, b.Preemptions, a.Preemptions,
		computed(b), computed(a), cached(b), cached(a))
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }

func (d *show) keep(gw *gateway.Gateway) {
	url, admin := "http://"+gw.Addr(), "http://"+gw.AdminAddr()
	self := cmp.Or(d.o.Self, "kvgate")
	d.print("\n%s\n\n", d.paint.bold("The gateway and the servers stay up; stop with ctrl-c. Try:"))
	for _, line := range []string{
		"curl -s " + url + "/v1/models",
		"curl -sN " + url + "/v1/chat/completions -H 'Content-Type: application/json' -d '{\"model\": \"sql\", \"stream\": true, \"max_tokens\": 20, \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'",
		self + " endpoints --admin " + admin,
		self + " explain -m sql --admin " + admin,
		"curl -s '" + admin + "/debug/decisions?n=1'",
		"curl -s " + admin + "/metrics | grep kvgate_",
		self + " top --admin " + admin,
	} {
		d.print("  %s\n", line)
	}
	d.print("\nThe same in a browser: %s/dashboard/\n", admin)
}

// live prints each request as it ends.
type live struct {
	*show
	mu    sync.Mutex
	every int                      // one request in so many is shown
	sent  map[string]time.Duration // by ID of a request that is shown: when it is sent
	names map[string]string        // endpoint ID to name
}

func (l *live) header(requests int) {
	l.print("Near tie: its home: of endpoints that cost about the same, a prompt's beginning always goes to the same one, and gathers there.\n")
	if l.every > 1 {
		l.print("One request in %d is shown, as they end; --verbose shows all %d.\n", l.every, requests)
	}
	l.print("%s\n", l.paint.dim(fmt.Sprintf("%7s  %-9s %-14s    %-8s %8s  %s", "sent at", "request", "model", "endpoint", "TTFT",
		"why (cost: work before the first token, in prefill tokens; less is better)")))
}

// Observe implements telemetry.Sink.
func (l *live) Observe(r *telemetry.Record) {
	sent, ok := l.sent[r.RequestID]
	if r.API != "chat_completions" || !ok {
		return
	}
	_, model, based := strings.Cut(r.Model, "/")
	if !based {
		model = r.Model
	}
	name := cmp.Or(l.names[r.Endpoint], r.Endpoint, "-")
	ttft := "-"
	if r.TTFTSeconds > 0 {
		ttft = fmt.Sprintf("%.2f s", r.TTFTSeconds)
	}
	line := fmt.Sprintf("%-9s %-14.14s -> ", r.RequestID, model)
	why := l.why(r)
	l.mu.Lock()
	defer l.mu.Unlock()
	at := fmt.Sprintf("%6.1fs", sent.Seconds())
	if room := l.o.Width - 53; l.o.Width > 0 && len([]rune(why)) > room {
		why = string([]rune(why)[:max(0, room-1)]) + "…"
	}
	l.print("%s  %s %s %8s  %s\n", l.paint.dim(at), line, l.paint.name(fmt.Sprintf("%-8s", name)), ttft, l.paint.dim(why))
}

// why says in a few words what the decision rested on.
func (l *live) why(r *telemetry.Record) string {
	if r.Outcome != "ok" {
		return r.Outcome + ": " + r.Error
	}
	if !r.Decided || r.Cost == 0 {
		return "its turn"
	}
	var parts []string
	if r.Adapter != "" {
		if r.AdapterResident {
			parts = append(parts, "adapter loaded")
		} else {
			parts = append(parts, "loads adapter")
		}
	}
	if hit := r.PromptTokens - r.NewTokens; hit > 0 && r.PromptTokens > 0 {
		parts = append(parts, fmt.Sprintf("%d%% cached", 100*hit/r.PromptTokens))
	}
	cost := fmt.Sprintf("cost %.0f", r.Cost)
	if r.RunnerUp != "" && r.RunnerUpCost < r.Cost {
		parts = append(parts, "near tie: its home")
	}
	if r.RunnerUp != "" {
		cost += fmt.Sprintf(", %s %.0f", cmp.Or(l.names[r.RunnerUp], r.RunnerUp), r.RunnerUpCost)
	}
	return strings.Join(append([]string{cost}, parts...), ", ")
}

// paint colours text, or not.
type paint bool

func (p paint) with(code, s string) string {
	if !p {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

func (p paint) bold(s string) string { return p.with("1", s) }
func (p paint) dim(s string) string  { return p.with("2", s) }

// name gives each server a colour of its own.
func (p paint) name(s string) string {
	return p.with(fmt.Sprint(32+hash(strings.TrimSpace(s))%5), s)
}
