package proxybench

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// A Scenario is one kind of traffic.
type Scenario struct {
	Name, Doc string
	BodyBytes int
	Conns     int
	Rate      float64 // requests per second, sent when they are due, whatever has come back; 0: as fast as answers come
	Chunks    int     // of a stream; 0: no stream
	Gap       time.Duration
	Fresh     bool // a connection for each request
	Idle      bool // connections that have had one request
	TLS       bool // between client and proxy
	PageBytes int  // of the endpoints' metrics; no requests are made if Scrape is set
	Scrape    bool
	// Memory has each round begin with a new process, whose memory is compared before and during the load.
	Memory     bool
	Window     time.Duration // default Options.Window
	Candidates []string
}

const (
	direct       = "direct"
	nginx        = "nginx"
	nginxLog     = "nginx log"
	nginxWhole   = "nginx whole"
	haproxy      = "HAProxy"
	reverseProxy = "ReverseProxy"
	fastHTTP     = "fasthttp"
	kvgate8      = "kvgate 8"
	kvgate64     = "kvgate 64"
	kvgate100    = "kvgate 100"
	kvgate1000   = "kvgate 1000"
	kvgateLog    = "kvgate 64 log"
	kvgateTwo    = "kvgate 64 2 cores"
	other64      = "other 64"
	other1000    = "other 1000"
)

// A candidate is something that stands between clients and model servers.
type candidate struct {
	name      string
	doc       string
	endpoints int  // kvgate: of its pool
	accessLog bool // a line per request, to /dev/null
	whole     bool // nginx: the body is read whole
	cores     int
	other     bool // Options.Against
}

var candidates = []candidate{
	{name: direct, doc: "nothing in between"},
	{name: nginx, doc: "one worker, keep-alive to one server, no buffering"},
	{name: nginxWhole, doc: "the same, but it reads a body to its end, into memory, before it sends it on, as kvgate has to", whole: true},
	{name: nginxLog, doc: "the same with its access log", accessLog: true},
	{name: haproxy, doc: "one thread, keep-alive to one server"},
	{name: reverseProxy, doc: "Go's httputil.ReverseProxy"},
	{name: fastHTTP, doc: "a proxy of fasthttp's server and client, streaming both ways"},
	{name: kvgate8, doc: "everything on but the access log, policy auto over 8 endpoints", endpoints: 8},
	{name: kvgate64, doc: "… over 64 endpoints", endpoints: 64},
	{name: kvgate100, doc: "… over 100 endpoints", endpoints: 100},
	{name: kvgate1000, doc: "… over 1,000 endpoints", endpoints: 1000},
	{name: kvgateLog, doc: "64 endpoints with the access log", endpoints: 64, accessLog: true},
	{name: kvgateTwo, doc: "64 endpoints, GOMAXPROCS 2", endpoints: 64, cores: 2},
	{name: other64, doc: "the build of --against over 64 endpoints", endpoints: 64, other: true},
	{name: other1000, doc: "… over 1,000 endpoints", endpoints: 1000, other: true},
}

func candidateByName(name string) (candidate, bool) {
	i := slices.IndexFunc(candidates, func(c candidate) bool { return c.name == name })
	if i < 0 {
		return candidate{}, false
	}
	return candidates[i], true
}

func (c candidate) isKvgate() bool { return c.endpoints > 0 }

var (
	peers  = []string{direct, nginx, haproxy, reverseProxy, fastHTTP, kvgate64}
	bodies = []string{direct, nginx, nginxWhole, haproxy, reverseProxy, fastHTTP, kvgate64}
)

// Scenarios are all there are.
var Scenarios = []Scenario{
	{
		Name: "1KB", Doc: "bodies of 1 KB, 32 connections, as fast as answers come", BodyBytes: 1 << 10, Conns: 32,
		Candidates: []string{direct, nginx, nginxLog, haproxy, reverseProxy, fastHTTP, kvgate8, kvgate64, kvgateLog, kvgateTwo, kvgate1000},
	},
	{Name: "16KB", Doc: "bodies of 16 KB, 32 connections", BodyBytes: 16 << 10, Conns: 32, Candidates: peers},
	{Name: "256KB", Doc: "bodies of 256 KB, 16 connections", BodyBytes: 256 << 10, Conns: 16, Candidates: bodies},
	{Name: "2MB", Doc: "bodies of 2 MB, 8 connections", BodyBytes: 2 << 20, Conns: 8, Candidates: bodies},
	{Name: "1KB-1000rps", Doc: "bodies of 1 KB, 1,000 requests/s, 64 connections", BodyBytes: 1 << 10, Conns: 64, Rate: 1000, Window: 2 * time.Second, Candidates: peers},
	{Name: "1KB-4000rps", Doc: "bodies of 1 KB, 4,000 requests/s, 64 connections", BodyBytes: 1 << 10, Conns: 64, Rate: 4000, Window: 2 * time.Second, Candidates: peers},
	{Name: "SSE", Doc: "streams of 50 chunks, each sent when the client has the one before, 32 connections", BodyBytes: 1 << 10, Conns: 32, Chunks: 50, Candidates: peers},
	{
		Name: "SSE-1000", Doc: "1,000 streams of 50 chunks 100 ms apart", BodyBytes: 1 << 10, Conns: 1000, Chunks: 50,
		Gap: 100 * time.Millisecond, Memory: true, Window: 3 * time.Second, Candidates: peers,
	},
	{
		Name: "SSE-5000", Doc: "5,000 streams of 50 chunks 100 ms apart", BodyBytes: 1 << 10, Conns: 5000, Chunks: 50,
		Gap: 100 * time.Millisecond, Memory: true, Window: 3 * time.Second, Candidates: peers,
	},
	{Name: "idle-5000", Doc: "5,000 connections that have had one request each", BodyBytes: 1 << 10, Conns: 5000, Idle: true, Memory: true, Candidates: peers},
	{Name: "connect", Doc: "bodies of 1 KB, a connection for each request, 32 at a time", BodyBytes: 1 << 10, Conns: 32, Fresh: true, Candidates: peers},
	{Name: "TLS", Doc: "bodies of 1 KB, 32 connections, TLS between client and proxy", BodyBytes: 1 << 10, Conns: 32, TLS: true, Candidates: []string{nginx, haproxy, reverseProxy, fastHTTP, kvgate64}},
	{Name: "scrape", Doc: "100 endpoints with metrics of 300 KB, read once a second, and no requests", PageBytes: 300 << 10, Scrape: true, Window: 4 * time.Second, Candidates: []string{kvgate100}},
}

// choose returns the scenarios of these names, all without any, each with the named candidates only, all without any.
func choose(scenarios, names []string) ([]Scenario, error) {
	var out []Scenario
	for _, s := range Scenarios {
		if len(scenarios) > 0 && !slices.Contains(scenarios, s.Name) {
			continue
		}
		if len(names) > 0 {
			// An asked-for candidate runs in every scenario that is asked for.
			var cs []string
			for _, c := range candidates {
				if slices.Contains(names, c.name) && (len(scenarios) > 0 || slices.Contains(s.Candidates, c.name)) {
					cs = append(cs, c.name)
				}
			}
			s.Candidates = cs
		}
		if len(s.Candidates) > 0 {
			out = append(out, s)
		}
	}
	for _, name := range scenarios {
		if !slices.ContainsFunc(Scenarios, func(s Scenario) bool { return s.Name == name }) {
			return nil, fmt.Errorf("no scenario %q; there are %s", name, strings.Join(ScenarioNames(), ", "))
		}
	}
	for _, name := range names {
		if _, ok := candidateByName(name); !ok {
			return nil, fmt.Errorf("no candidate %q; there are %s", name, strings.Join(CandidateNames(), "; "))
		}
	}
	return out, nil
}

// ScenarioNames are the names of Scenarios.
func ScenarioNames() (out []string) {
	for _, s := range Scenarios {
		out = append(out, s.Name)
	}
	return out
}

// CandidateNames are the names of all candidates.
func CandidateNames() (out []string) {
	for _, c := range candidates {
		out = append(out, c.name)
	}
	return out
}

// Help describes scenarios and candidates.
func Help() string {
	var b strings.Builder
	b.WriteString("Scenarios:")
	for _, s := range Scenarios {
		fmt.Fprintf(&b, "\n  %-13s %s", s.Name, s.Doc)
	}
	b.WriteString("\n\nCandidates:")
	for _, c := range candidates {
		fmt.Fprintf(&b, "\n  %-19s %s", c.name, c.doc)
	}
	return b.String()
}
