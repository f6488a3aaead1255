package load

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Target is a server or gateway that requests are sent to.
type Target struct {
	Name string
	URL  string // http://host:port, with /v1 behind it or without
	Key  string `json:"-"` // API key; "": none. It gets into no output.
}

// Arrivals are the processes by which requests arrive.
var Arrivals = []string{"poisson", "constant", "burst", "closed"}

// APIs are the ways to ask.
var APIs = []string{"chat", "completions"}

// Options say what is sent, when and where. Run refuses what makes no sense; New has the defaults.
type Options struct {
	Targets []Target // one, or two to be compared

	API      string // one of APIs
	Stream   bool
	NoUsage  bool           // don't ask streams for their usage; tokens are then counted as events
	Model    string         // "": the first model that the first target lists
	Adapters []string       // asked for in place of Model, the first most often
	Zipf     float64        // exponent of the adapters' popularity; 0: all alike
	Extra    map[string]any // added to every body

	Arrival string  // one of Arrivals
	Rate    float64 // requests per second over all targets, in the long run; not with closed
	Burst   int     // with burst: requests at a time
	Clients int     // with closed: how many ask, each again as soon as it is answered

	Duration    time.Duration // of what counts; 0: until Requests
	Requests    int           // that count; 0: until Duration
	WarmUp      time.Duration // before it: sent and not counted
	Timeout     time.Duration // of a request, from when it is sent to its end
	MaxInFlight int           // conversations at a time; what arrives beyond waits, and its wait counts
	Slice       time.Duration // with two targets: give each target all the traffic in turn, for so long; 0: request by request

	Input, Output Dist // tokens of a turn's own prompt, and of its answer at most
	Prefixes      int  // shared prefixes, one before each conversation; 0: none
	PrefixTokens  Dist
	PrefixZipf    float64
	Turns         Dist // requests of a conversation, each with all before it
	Think         Dist // seconds between an answer and the next turn

	Seed uint64
	Salt string // begins every prompt, so that no earlier run has warmed a cache; Run draws one if it is empty

	Progress func(Progress) // called a few times a second, never at the same time
}

// A Progress is how far a run is.
type Progress struct {
	Elapsed  time.Duration // of Duration and WarmUp
	Share    float64       // 0..1
	Done     int           // requests that ended, warm-up included
	Failed   int
	InFlight int
	WarmUp   bool
}

// New returns the defaults.
func New() Options {
	return Options{
		API: "chat", Stream: true, Arrival: "poisson", Rate: 4, Zipf: 1,
		Timeout: 5 * time.Minute, MaxInFlight: 10_000,
		Input: Const(256), Output: Const(128), PrefixTokens: Const(1024), Turns: Const(1),
		Seed: 1,
	}
}

// ParseTarget reads URL or NAME=URL.
func ParseTarget(text string) (Target, error) {
	t := Target{URL: text}
	if name, u, ok := strings.Cut(text, "="); ok && !strings.ContainsAny(name, ":/") {
		t.Name, t.URL = name, u
		if name == "" || len(name) > 32 {
			return t, fmt.Errorf("%q: want a name of 1 to 32 letters before the =", redact(text))
		}
	}
	u, err := url.Parse(t.URL)
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return t, fmt.Errorf("%q is not a URL such as http://127.0.0.1:8080", redact(text))
	case u.User != nil:
		return t, errors.New("a URL with a user or password in it; give the key in a file or the environment")
	case u.RawQuery != "" || u.Fragment != "":
		return t, errors.New("a URL with ? or # in it; want one such as http://127.0.0.1:8080")
	}
	t.URL = strings.TrimRight(t.URL, "/")
	return t, nil
}

// redact takes what may be a password out of a URL that is wrong.
func redact(text string) string {
	if i := strings.LastIndexByte(text, '@'); i >= 0 {
		return "…" + text[i:]
	}
	return text
}

// path is where a target serves p, a path below /v1.
func (t *Target) path(p string) string {
	if strings.HasSuffix(t.URL, "/v1") {
		return t.URL + p
	}
	return t.URL + "/v1" + p
}

// ExpandNames makes lora-1, lora-2 and lora-3 of lora-{1..3}.
func ExpandNames(names []string) (out []string, err error) {
	for _, n := range names {
		before, rest, ok := strings.Cut(n, "{")
		inside, after, ok2 := strings.Cut(rest, "}")
		first, last, ok3 := strings.Cut(inside, "..")
		if !ok || !ok2 || !ok3 {
			out = append(out, n)
			continue
		}
		a, err := strconv.Atoi(first)
		b, err2 := strconv.Atoi(last)
		if err != nil || err2 != nil || a < 0 || b < a || b-a >= 100_000 {
			return nil, fmt.Errorf("%q; want whole numbers that count up, such as lora-{1..64}", n)
		}
		for i := a; i <= b; i++ {
			out = append(out, before+strconv.Itoa(i)+after)
		}
	}
	return out, nil
}

// An OptionsError says that Options make no sense.
type OptionsError struct{ err error }

func (e OptionsError) Error() string { return e.err.Error() }
func (e OptionsError) Unwrap() error { return e.err }

// check says what is wrong with o.
func (o *Options) check() error {
	switch {
	case len(o.Targets) < 1 || len(o.Targets) > 2:
		return fmt.Errorf("%d targets; want one, or two to be compared", len(o.Targets))
	case len(o.Targets) == 2 && o.Targets[0].Name == o.Targets[1].Name:
		return fmt.Errorf("two targets of the name %q", o.Targets[0].Name)
	case !slices.Contains(APIs, o.API):
		return fmt.Errorf("API %q; want %s", o.API, strings.Join(APIs, " or "))
	case !slices.Contains(Arrivals, o.Arrival):
		return fmt.Errorf("arrival %q; want %s", o.Arrival, strings.Join(Arrivals, ", "))
	case o.Arrival == "closed" && (o.Clients < 1 || o.Clients > 100_000):
		return fmt.Errorf("%d clients; want 1 to 100000", o.Clients)
	case o.Arrival != "closed" && !(o.Rate > 0 && o.Rate <= 1e6):
		return fmt.Errorf("a rate of %g; want requests per second, above 0 and up to 1e6", o.Rate)
	case o.Arrival == "burst" && (o.Burst < 1 || o.Burst > 100_000):
		return fmt.Errorf("bursts of %d; want 1 to 100000 requests", o.Burst)
	case o.Duration < 0 || o.Requests < 0 || o.WarmUp < 0 || o.Slice < 0:
		return errors.New("a negative duration or number of requests")
	case o.Duration == 0 && o.Requests == 0:
		return errors.New("neither a duration nor a number of requests")
	case o.Slice > 0 && len(o.Targets) != 2:
		return errors.New("slices need two targets")
	case o.Slice > 0 && (o.Duration == 0 || o.Requests > 0):
		return errors.New("slices need a duration, and no number of requests")
	case o.Slice > 0 && o.Duration < 2*o.Slice:
		return fmt.Errorf("a duration of %s holds no slice of %s for each target", o.Duration, o.Slice)
	case o.Timeout <= 0:
		return fmt.Errorf("a timeout of %s; want one above 0", o.Timeout)
	case o.MaxInFlight < 1:
		return fmt.Errorf("%d conversations at a time; want at least 1", o.MaxInFlight)
	case o.Prefixes < 0 || o.Prefixes > 1_000_000:
		return fmt.Errorf("%d prefixes; want 0 to 1000000", o.Prefixes)
	case !(o.Zipf >= 0 && o.Zipf <= 10) || !(o.PrefixZipf >= 0 && o.PrefixZipf <= 10):
		return errors.New("an exponent of Zipf's law outside 0 to 10")
	}
	for k := range o.Extra {
		if slices.Contains([]string{"model", "messages", "prompt", "stream"}, k) {
			return fmt.Errorf("%q can't be set in the extra fields of bodies", k)
		}
	}
	return nil
}

// A Setting is one line of what a result was measured with.
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

func (o *Options) settings() (out []Setting) {
	add := func(name, format string, args ...any) { out = append(out, Setting{name, fmt.Sprintf(format, args...)}) }
	add("api", "%s, %s", o.API, map[bool]string{true: "streamed", false: "not streamed"}[o.Stream])
	if len(o.Adapters) > 0 {
		add("adapters", "%d, Zipf %g", len(o.Adapters), o.Zipf)
	} else {
		add("model", "%s", o.Model)
	}
	switch o.Arrival {
	case "closed":
		add("arrivals", "closed loop of %d clients", o.Clients)
	case "burst":
		add("arrivals", "%g requests/s in bursts of %d", o.Rate, o.Burst)
	default:
		add("arrivals", "%s, %g requests/s", o.Arrival, o.Rate)
	}
	if o.Slice > 0 {
		add("targets take turns", "slices of %s", o.Slice)
	} else if len(o.Targets) == 2 {
		add("targets take turns", "request by request")
	}
	if o.Duration > 0 {
		add("duration", "%s after %s of warm-up", o.Duration, o.WarmUp)
	} else {
		add("requests", "%d after %s of warm-up", o.Requests, o.WarmUp)
	}
	add("input tokens", "about %s", o.Input)
	if o.Prefixes > 0 {
		add("shared prefixes", "%d of about %s tokens, Zipf %g", o.Prefixes, o.PrefixTokens, o.PrefixZipf)
	}
	add("output tokens", "up to %s", o.Output)
	if o.Turns != Const(1) {
		add("turns", "%s, %s s apart", o.Turns, o.Think)
	}
	if len(o.Extra) > 0 {
		b, _ := json.Marshal(o.Extra)
		add("extra", "%s", b)
	}
	add("timeout", "%s", o.Timeout)
	add("seed, salt", "%d, %s", o.Seed, o.Salt)
	return out
}
