package soak

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvgate/config"
	"kvgate/internal/auth"
)

const numClients = 200

// A soak is one run: the gateway, the servers before it is their trouble, and the clients.
type soak struct {
	t       *testing.T
	seed    uint64
	length  time.Duration
	dir     string
	servers [numServers]*process
	urls    [numServers]string
	gate    *process
	addr    string
	admin   string
	key     string // the clients'
	counts  counts
	hidden  []string
}

// Whatever happens to the servers: no client gets another's answer, or one that looks complete and isn't, or none; what is
// cut off says so; nothing stays booked; goroutines, descriptors and memory are as before; retries keep to their budget;
// and nobody's key, prompt or address is where it must not be.
//
// KVGATE_SOAK is how long it runs, KVGATE_SOAK_SEED what happens.
func TestSoak(t *testing.T) {
	s := &soak{t: t, seed: 1, length: 4 * time.Second, dir: t.TempDir()}
	if text := os.Getenv("KVGATE_SOAK"); text != "" {
		var err error
		if s.length, err = time.ParseDuration(text); err != nil {
			t.Fatalf("KVGATE_SOAK: %v", err)
		}
		s.seed = rand.Uint64N(1 << 32)
	}
	if text := os.Getenv("KVGATE_SOAK_SEED"); text != "" {
		var err error
		if s.seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("KVGATE_SOAK_SEED: %v", err)
		}
	}
	list := plan(s.seed, s.length)
	t.Logf("seed %d, %v, %d clients; to see it again: make soak SOAK=%v SEED=%d", s.seed, s.length, numClients, s.length, s.seed)
	t.Logf("%d troubles: %s", len(list), tally(list))
	s.start()

	// Everything that grows at first has grown when the baseline is taken.
	s.await("all answers to be whole before any trouble", func() bool { return s.quiet(numClients) == numClients })
	var before measurement
	s.await("the gateway to be idle", func() bool {
		before = s.measure()
		return before.goroutines < 40 && before.descriptors < 40 // it has a handful of files open, and 17 goroutines or so
	})
	t.Logf("before: %s", before)

	began := time.Now()
	ended := make(chan struct{})
	var troubles, work sync.WaitGroup
	for i := range numServers {
		troubles.Go(func() { s.trouble(i, list, began) })
	}
	work.Go(func() { s.reload(ended) })
	if s.length > time.Minute {
		work.Go(func() { s.report(ended) })
	}
	var clients sync.WaitGroup
	for i := range numClients {
		c := s.client(i, s.seed)
		clients.Go(func() { c.run(began.Add(s.length)) })
	}
	clients.Wait()
	troubles.Wait()
	close(ended)
	work.Wait()
	t.Logf("%d answers: %s", s.counts.of("sent"), &s.counts)

	// It recovers: with the servers well again, so is everything.
	s.await("all answers to be whole again", func() bool { return s.quiet(20) == 20 })
	s.settle(before)
	s.books()
	s.secrets()
	if s.length >= time.Minute && (s.counts.of(whole) == 0 || s.counts.of("cut off with an error event") == 0 || s.counts.of("left") == 0) {
		t.Error("not every kind of end was seen")
	}
	s.gate.end(syscall.SIGTERM)
	if s.gate.code != 0 {
		t.Errorf("the gateway ended with code %d", s.gate.code)
	}
	for _, p := range append(s.servers[:], s.gate) {
		if said := p.said.String(); strings.Contains(said, "DATA RACE") || strings.Contains(said, "panic") {
			t.Errorf("%v: %s", p.args, said[:min(len(said), 4000)])
		}
	}
}

// await fails the test if f does not report true in time.
func (s *soak) await(what string, f func() bool) {
	s.t.Helper()
	if !within(time.Minute, f) {
		s.t.Fatalf("waited a minute for %s; the gateway says %s", what, tail(s.gate.said.String()))
	}
}

func (s *soak) start() {
	for i := range s.servers {
		port := freePort(s.t)
		s.urls[i] = fmt.Sprintf("http://127.0.0.1:%d", port)
		s.servers[i] = &process{t: s.t, args: []string{
			"sim", "--listen", fmt.Sprintf("127.0.0.1:%d", port), "--model", "m", "--speedup", "2", "--api-key", plantedEndpoint,
		}}
		s.hidden = append(s.hidden, fmt.Sprintf("127.0.0.1:%d", port))
	}
	s.key = auth.NewKey()
	s.hidden = append(s.hidden, plantedEndpoint, plantedClient, s.key)
	sum, _ := auth.Sum(s.key)
	entry := config.Key{ID: "soak", Tenant: "soak", Class: "normal", Hash: "sha256:" + hex.EncodeToString(sum[:])}
	if err := os.WriteFile(filepath.Join(s.dir, "keys.yaml"), []byte("keys:\n"+entry.Entry()), 0o600); err != nil {
		s.t.Fatal(err)
	}
	s.addr = fmt.Sprintf("127.0.0.1:%d", freePort(s.t))
	s.admin = fmt.Sprintf("http://127.0.0.1:%d", freePort(s.t))
	s.configure("")
	s.gate = &process{t: s.t, args: []string{"serve", "-c", filepath.Join(s.dir, "config.yaml"), "--watch", "-1s"}}
	s.t.Cleanup(func() {
		for _, p := range append(s.servers[:], s.gate) {
			p.signal(syscall.SIGCONT)
			p.end(syscall.SIGKILL)
		}
	})
	for _, p := range s.servers {
		p.start()
	}
	for _, u := range s.urls {
		s.await("a server", func() bool { return send("GET", u+"/health", "") })
	}
	s.gate.start()
	s.await("the gateway", func() bool { return strings.HasPrefix(get(s.admin+"/-/ready"), "ready") })
}

// configure writes the configuration, with something more in it.
func (s *soak) configure(more string) {
	text := fmt.Sprintf(`listen: %q
admin: {listen: %q}
log: {level: debug, file: gate.log}
auth: {keys_file: keys.yaml}
limits: {prefix_index_bytes: 1MiB, in_flight_body_bytes: 64MiB}
timeouts: {connect: 500ms, first_token: 1500ms, idle: 1s, total: 8s, endpoint_idle: 500ms}
health: {base_pause: 200ms, max_pause: 1s, slow_start: 1s}
scrape: {interval: 250ms, timeout: 500ms}
drain: {delay: 0s, timeout: 5s}
pools:
  - name: p
    api_key: %s
    discovery: {static: [%q, %q, %q]}
%s`, s.addr, strings.TrimPrefix(s.admin, "http://"), plantedEndpoint, s.urls[0], s.urls[1], s.urls[2], more)
	if err := os.WriteFile(filepath.Join(s.dir, "config.yaml"), []byte(text), 0o600); err != nil {
		s.t.Error(err)
	}
}

func (s *soak) client(i int, seed uint64) *client {
	return &client{
		t: s.t, addr: s.addr, id: i, r: rand.New(rand.NewPCG(seed, uint64(1000+i))), counts: &s.counts, key: s.key,
		think: 400 * time.Millisecond, hidden: s.hidden,
	}
}

// quiet has n clients ask once each, beside everything, and returns how many answers are whole.
func (s *soak) quiet(n int) int {
	var wg sync.WaitGroup
	ends := &counts{}
	for i := range n {
		wg.Go(func() {
			c := s.client(numClients+i, rand.Uint64()) // what is asked does not matter
			c.counts = ends
			defer c.hangUp()
			c.ask(false)
		})
	}
	wg.Wait()
	if ends.of(whole) != n {
		s.t.Logf("not all is well yet: %s", ends)
	}
	return ends.of(whole)
}

// trouble does to server i what the plan says, and leaves it well.
func (s *soak) trouble(i int, list []trouble, began time.Time) {
	p, faults := s.servers[i], s.urls[i]+"/sim/faults"
	for _, tr := range list {
		if tr.server != i {
			continue
		}
		time.Sleep(time.Until(began.Add(tr.at)))
		switch tr.kind {
		case killed, restarted:
			sig := syscall.SIGKILL
			if tr.kind == restarted {
				sig = syscall.SIGTERM
			}
			p.end(sig)
			time.Sleep(time.Until(began.Add(tr.at + tr.lasts)))
			p.start()
			if !within(30*time.Second, func() bool { return send("GET", s.urls[i]+"/health", "") }) {
				s.t.Errorf("%s has not come back: %s", s.urls[i], tail(p.said.String()))
				return
			}
		case stopped:
			p.signal(syscall.SIGSTOP)
			time.Sleep(time.Until(began.Add(tr.at + tr.lasts)))
			p.signal(syscall.SIGCONT)
		default:
			b, err := json.Marshal(tr.faults)
			if err != nil {
				s.t.Error(err)
			}
			if !send("POST", faults, string(b)) {
				s.t.Errorf("%s does not take %s", faults, b)
			}
			time.Sleep(time.Until(began.Add(tr.at + tr.lasts)))
			if !send("DELETE", faults, "") {
				s.t.Errorf("%s does not clear", faults)
			}
		}
	}
}

// reload changes the configuration now and then, every third time to one that is refused, every third to one in which
// requests wait.
func (s *soak) reload(ended <-chan struct{}) {
	for i := 1; ; i++ {
		select {
		case <-ended:
			s.configure("")
			s.gate.signal(syscall.SIGHUP)
			return
		case <-time.After(2 * time.Second):
		}
		s.configure([]string{"nonsense: true\n", "    policy: least_requests\n", "    admission: {endpoint_requests: 20, max_wait: 2s, max_waiting: 50}\n"}[i%3])
		s.gate.signal(syscall.SIGHUP)
	}
}

// report says now and then how it goes.
func (s *soak) report(ended <-chan struct{}) {
	began := time.Now()
	for {
		select {
		case <-ended:
			return
		case <-time.After(time.Minute):
			s.t.Logf("%v: %s; %s", time.Since(began).Round(time.Second), s.measure(), &s.counts)
		}
	}
}

// A measurement is what a process holds.
type measurement struct {
	goroutines, descriptors    int
	heapKB, residentKB, peakKB int
}

func (m measurement) String() string {
	return fmt.Sprintf("%d goroutines, %d descriptors, %d KB heap, %d KB resident, %d KB at most", m.goroutines, m.descriptors, m.heapKB, m.residentKB, m.peakKB)
}

var heapAlloc = regexp.MustCompile(`(?m)^# HeapAlloc = (\d+)`)

// busy counts the goroutines of a profile. fasthttp's workers that wait for a connection, which it keeps for up to 20 s, are
// not counted.
func busy(profile string) (n int) {
	for group := range strings.SplitSeq(profile, "\n\n") {
		if strings.Contains(group, "workerPool).workerFunc") && !strings.Contains(group, "serveConn") {
			continue
		}
		for line := range strings.Lines(group) {
			var of int
			if _, err := fmt.Sscanf(line, "%d @", &of); err == nil {
				n += of
			}
		}
	}
	return n
}

func (s *soak) measure() (m measurement) {
	number := func(re *regexp.Regexp, text string) int {
		found := re.FindStringSubmatch(text)
		if found == nil {
			return -1
		}
		n, _ := strconv.Atoi(found[1])
		return n
	}
	m.goroutines = busy(get(s.admin + "/debug/pprof/goroutine?debug=1"))
	get(s.admin + "/debug/pprof/heap?gc=1") // what pools hold is gone with the second collection
	get(s.admin + "/debug/pprof/heap?gc=1")
	m.heapKB = number(heapAlloc, get(s.admin+"/debug/pprof/heap?gc=1&debug=1")) / 1024
	pid := s.gate.pid()
	m.descriptors = descriptors(pid)
	m.residentKB, m.peakKB = memoryKB(pid, "VmRSS"), memoryKB(pid, "VmHWM")
	return m
}

// settle waits until the gateway holds no more than before.
func (s *soak) settle(before measurement) {
	// The decisions and counters of the last thousand requests are kept; they were fewer before.
	const slackKB = 12 << 10
	var now measurement
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		now = s.measure()
		if now.goroutines <= before.goroutines+2 && now.descriptors <= before.descriptors+2 && now.heapKB <= before.heapKB+slackKB {
			break
		}
		if time.Now().After(end) {
			s.t.Errorf("the gateway holds more than before: %s; before %s", now, before)
			s.t.Logf("its goroutines: %.20000s", get(s.admin+"/debug/pprof/goroutine?debug=1"))
			break
		}
	}
	s.t.Logf("after: %s", now)
}

// books checks that nothing is booked, and what the metrics and the access log say of attempts.
func (s *soak) books() {
	type row struct {
		URL    string
		Booked struct {
			Requests      int   `json:"requests"`
			PendingTokens int64 `json:"pending_tokens"`
			KVTokens      int64 `json:"kv_tokens"`
		}
	}
	var snapshot struct{ Endpoints []row }
	s.await("bookings to be zero", func() bool {
		snapshot.Endpoints = nil
		if json.Unmarshal([]byte(get(s.admin+"/debug/snapshot")), &snapshot) != nil || len(snapshot.Endpoints) != numServers {
			return false
		}
		for _, r := range snapshot.Endpoints {
			if b := r.Booked; b.Requests != 0 || b.PendingTokens != 0 || b.KVTokens != 0 {
				return false
			}
		}
		return true
	})
	log, err := os.ReadFile(filepath.Join(s.dir, "gate.log"))
	if err != nil {
		s.t.Fatal(err)
	}
	requests, again, most := 0, 0, 0
	outcomes := counts{}
	for line := range strings.Lines(string(log)) {
		var l struct {
			Msg, Outcome, Level string
			Attempts            int
		}
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			s.t.Fatalf("%v: log line %q", err, line)
		}
		if strings.Contains(l.Msg, "panic") {
			s.t.Errorf("the gateway says %s", line)
		}
		if l.Msg != "request" {
			continue
		}
		requests++
		outcomes.add(l.Outcome)
		if most = max(most, l.Attempts); l.Attempts > 1 {
			again++
		}
	}
	s.t.Logf("%d requests logged, %d of them tried twice; %s", requests, again, &outcomes)
	if most > 2 {
		s.t.Errorf("a request was tried %d times; want 2 at most", most)
	}
	// A fifth of the active requests may be in a second try, or three. Tries that are refused at once take no time, so a
	// share of requests says less than one of time; it bounds what a storm would be.
	if limit := requests/4 + 3*int(s.length/time.Second); again > limit {
		s.t.Errorf("%d of %d requests were tried again; want %d at most", again, requests, limit)
	}
	sent, left := s.counts.of("sent"), s.counts.of("left")
	if requests < sent-left {
		s.t.Errorf("%d requests were sent, %d of which were left, and %d are logged", sent, left, requests)
	}
}

// secrets looks for what was planted in everything that the gateway shows and writes.
func (s *soak) secrets() {
	written := map[string]string{"standard error": s.gate.said.String()}
	b, err := os.ReadFile(filepath.Join(s.dir, "gate.log"))
	if err != nil {
		s.t.Fatal(err)
	}
	written["the log"] = string(b)
	for _, path := range []string{"/metrics", "/debug/snapshot", "/debug/models", "/debug/decisions", "/debug/config", "/debug/sources", "/debug/pprof/goroutine?debug=2", "/debug/pprof/cmdline"} {
		written[path] = get(s.admin + path)
	}
	for where, text := range written {
		for _, secret := range []string{plantedBody, plantedClient, plantedEndpoint, s.key, s.key[len(s.key)-20:], "nonce-"} {
			if i := strings.Index(text, secret); i >= 0 {
				s.t.Errorf("%s holds %q: %q", where, secret, text[max(0, i-300):min(len(text), i+100)])
			}
		}
	}
}
