// Package livebench sends one workload through real processes, in real time: simulated model servers and the gateway under
// one policy after another, over sockets. What clients see is shown beside what the comparison in virtual time predicts for
// the same requests. The figures are compared as ratios between policies: a laptop has other things to do, too.
//
// It must not be imported by the product's packages.
package livebench

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"kvgate/bench/policies"
)

// Options describe a run. The zero value of a field is its default.
type Options struct {
	Binary   []string          // command line that runs kvgate, without arguments for it; required
	Policies []policies.Policy // by names that the gateway knows too; required
	Workload string            // a generator's name (conversation)
	Servers  int               // model servers (4)
	Requests int               // per policy (240)
	Rate     float64           // requests per second of the servers' time (4.5)
	Speedup  float64           // of the servers (2)
	Seed     uint64            // (1)
	Progress func(string)
}

// A Result is one policy, live and in virtual time. Live times are those of servers at their own pace.
type Result struct {
	Policy                  string
	Failed                  int
	LiveMean, LiveP99       time.Duration // time to first token, as clients saw it
	VirtualMean, VirtualP99 time.Duration
}

// Run sends the workload under each policy.
func Run(ctx context.Context, o Options) ([]Result, error) {
	o.Workload, o.Servers, o.Requests = cmp.Or(o.Workload, "conversation"), cmp.Or(o.Servers, 4), cmp.Or(o.Requests, 240)
	o.Rate, o.Speedup, o.Seed = cmp.Or(o.Rate, 4.5), cmp.Or(o.Speedup, 2), cmp.Or(o.Seed, 1)
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	g, ok := policies.GeneratorByName(o.Workload)
	if !ok {
		return nil, fmt.Errorf("no workload %q", o.Workload)
	}
	w := g.Make(o.Requests, o.Seed)
	var out []Result
	for _, p := range o.Policies {
		r := Result{Policy: p.Name}
		v, err := policies.Run(w, p, policies.Options{Replicas: o.Servers, Rate: o.Rate, Seed: o.Seed, ScrapeEvery: time.Second, WarmUp: warmUp})
		if err != nil {
			return out, err
		}
		r.VirtualMean, r.VirtualP99 = v.TTFTMean, v.TTFTP99
		o.Progress(fmt.Sprintf("%s: %d requests in %.0f s", p.Name, o.Requests, float64(o.Requests)/o.Rate/o.Speedup))
		if err := r.live(ctx, w, &o); err != nil {
			return out, fmt.Errorf("%s: %w", p.Name, err)
		}
		out = append(out, r)
	}
	return out, nil
}

// warmUp is the share of requests that don't count.
const warmUp = 0.1

// live runs servers and a gateway and sends them the workload.
func (r *Result) live(ctx context.Context, w *policies.Workload, o *Options) error {
	dir, err := os.MkdirTemp("", "kvgate-live-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var urls []string
	stopServers, err := start(ctx, o.Binary, func(line string) bool {
		if strings.HasPrefix(line, "http://") {
			urls = append(urls, line)
		}
		return len(urls) == o.Servers
	}, "sim", "-n", strconv.Itoa(o.Servers), "--listen", "127.0.0.1:0", "--speedup", strconv.FormatFloat(o.Speedup, 'g', -1, 64))
	if err != nil {
		return err
	}
	defer stopServers()

	file := filepath.Join(dir, "config.yaml")
	text := "listen: 127.0.0.1:0\nadmin: {listen: '127.0.0.1:0'}\nlog: {access: off}\ndrain: {delay: 0s, timeout: 1s}\n" +
		"timeouts: {first_token: 10m, total: 20m}\npools:\n  - name: live\n    policy: " + r.Policy + "\n    discovery: {static: [" + strings.Join(urls, ", ") + "]}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	var ready struct {
		Msg    string   `json:"msg"`
		Listen string   `json:"listen"`
		Models []string `json:"models"`
	}
	stopGateway, err := start(ctx, o.Binary, func(line string) bool {
		return json.Unmarshal([]byte(line), &ready) == nil && ready.Msg == "ready"
	}, "serve", "-c", file)
	if err != nil {
		return err
	}
	defer stopGateway()
	if len(ready.Models) == 0 {
		return errors.New("the gateway knows no model")
	}

	var mu sync.Mutex
	var ttft []time.Duration
	var wg sync.WaitGroup
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}
	defer client.CloseIdleConnections()
	scale := w.Rate() / o.Rate / o.Speedup
	began := time.Now()
	for i := range w.Requests {
		q := &w.Requests[i]
		select {
		case <-time.After(time.Until(began.Add(time.Duration(float64(q.At) * scale)))):
		case <-ctx.Done():
			return ctx.Err()
		}
		wg.Go(func() {
			d, err := ask(ctx, client, "http://"+ready.Listen+"/v1/completions", body(w, q, i, ready.Models[0]))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				r.Failed++
			case i >= int(warmUp*float64(len(w.Requests))):
				ttft = append(ttft, time.Duration(float64(d)*o.Speedup))
			}
		})
	}
	wg.Wait()
	if len(ttft) == 0 {
		return errors.New("no request was answered")
	}
	slices.Sort(ttft)
	for _, d := range ttft {
		r.LiveMean += d / time.Duration(len(ttft))
	}
	r.LiveP99 = ttft[len(ttft)*99/100]
	return nil
}

// start runs kvgate with args until the function that is returned is called. It returns when ready says so of a line.
func start(ctx context.Context, binary []string, ready func(line string) bool, args ...string) (stop func(), err error) {
	c := exec.CommandContext(ctx, binary[0], append(slices.Clone(binary[1:]), args...)...)
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.Stderr = c.Stdout // one pipe for both
	if err := c.Start(); err != nil {
		return nil, err
	}
	found := make(chan bool)
	read := make(chan struct{})
	go func() {
		defer close(read)
		lines := bufio.NewScanner(out)
		seen := false
		for lines.Scan() {
			if !seen && ready(lines.Text()) {
				seen = true
				close(found)
			}
		}
		_, _ = io.Copy(io.Discard, out)
	}()
	stop = func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(10*time.Second, func() { _ = c.Process.Kill() })
		defer kill.Stop()
		<-read
		_ = c.Wait()
	}
	select {
	case <-found:
		return stop, nil
	case <-read:
		stop()
		return nil, fmt.Errorf("kvgate %s ended at once", args[0])
	case <-time.After(30 * time.Second):
		stop()
		return nil, fmt.Errorf("kvgate %s is not ready", args[0])
	}
}

// body is the completion request that stands for q: each block of its prompt is text made of the block's id, four bytes a
// token, and what is beyond the last full block is its own.
func body(w *policies.Workload, q *policies.Request, number int, model string) []byte {
	const bytesPerToken = 4
	var b bytes.Buffer
	b.Grow(q.In*bytesPerToken + 200)
	fmt.Fprintf(&b, `{"model":%q,"stream":true,"max_tokens":%d,"prompt":"`, model, q.Out)
	words := func(seed uint64, tokens int) {
		for range tokens {
			seed = seed*6364136223846793005 + 1442695040888963407
			for s := range bytesPerToken {
				b.WriteByte('a' + byte(seed>>(16+8*s)&0xff)%26)
			}
		}
	}
	for _, id := range q.Blocks {
		words(id, w.BlockTokens)
	}
	words(uint64(number)<<32|1, q.In-len(q.Blocks)*w.BlockTokens)
	b.WriteString(`"}`)
	return b.Bytes()
}

// ask sends a request and returns the time to the first event of its answer, which is read to its end.
func ask(ctx context.Context, client *http.Client, url string, body []byte) (ttft time.Duration, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	began := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("status %d", resp.StatusCode)
	}
	r := bufio.NewReader(resp.Body)
	for {
		line, err := r.ReadSlice('\n')
		if ttft == 0 && bytes.HasPrefix(line, []byte("data: {")) {
			ttft = time.Since(began)
		}
		switch {
		case err == io.EOF && ttft > 0:
			return ttft, nil
		case err != nil && !errors.Is(err, bufio.ErrBufferFull):
			return 0, err
		}
	}
}

// Agree reports whether the policies' mean times come in the same order live as in virtual time, as far as they differ by
// more than margin (0.1 is 10 %).
func Agree(rs []Result, margin float64) bool {
	for i := range rs {
		for j := range rs {
			clear := func(a, b time.Duration) bool { return float64(a)*(1+margin) < float64(b) }
			if clear(rs[i].VirtualMean, rs[j].VirtualMean) && clear(rs[j].LiveMean, rs[i].LiveMean) {
				return false
			}
		}
	}
	return true
}

// Write prints the results as a table.
func Write(out io.Writer, rs []Result) error {
	tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "policy\tlive TTFT mean\tp99\tof the first\tin virtual time mean\tp99\tof the first\tfailed\t")
	for _, r := range rs {
		ratio := func(a, b time.Duration) string { return fmt.Sprintf("%.2f ×", float64(a)/float64(b)) }
		fmt.Fprintf(tw, "%s\t%.3f s\t%.2f s\t%s\t%.3f s\t%.2f s\t%s\t%d\t\n", r.Policy,
			r.LiveMean.Seconds(), r.LiveP99.Seconds(), ratio(r.LiveMean, rs[0].LiveMean),
			r.VirtualMean.Seconds(), r.VirtualP99.Seconds(), ratio(r.VirtualMean, rs[0].VirtualMean), r.Failed)
	}
	return tw.Flush()
}
