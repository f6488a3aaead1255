package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"

	"kvgate/config"
)

func init() {
	register("dns", "Endpoints behind a DNS name: address records of a headless service, or SRV records.",
		func(d *config.Discovery) (config.DNSSource, bool) {
			if d.DNS == nil {
				return config.DNSSource{}, false
			}
			return *d.DNS, true
		},
		func(s config.DNSSource, _ Env) Source {
			return &dnsSource{s, (&resolver{confFile: "/etc/resolv.conf", port: "53"}).lookup}
		})
}

type dnsSource struct {
	config.DNSSource
	lookup func(ctx context.Context, s *config.DNSSource) (answer, error)
}

// An answer is a complete set of addresses and how long it may be believed.
type answer struct {
	addresses []netip.AddrPort
	ttl       time.Duration
}

const (
	// An address leaves only when this many answers in a row lack it: many resolvers answer with a changing part of a
	// long list, and a wrongly dropped endpoint costs its caches.
	missesToDrop = 3
	// A name without any address is more often a fault of DNS than the end of a service: the last set holds this long.
	emptyGrace = time.Minute
	// However short the TTL, DNS is not asked more often.
	shortestTTL = time.Second
)

func (s *dnsSource) Name() string { return "dns" }

func (s *dnsSource) Run(ctx context.Context, emit func([]Target, error)) error {
	known := make(map[netip.AddrPort]int) // to the number of answers in a row that lacked it
	var emptySince time.Time
	for {
		a, err := s.lookup(ctx, &s.DNSSource)
		wait := s.Interval
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			emit(nil, err)
		case len(a.addresses) == 0:
			if emptySince.IsZero() {
				emptySince = time.Now()
			}
			if len(known) > 0 && time.Since(emptySince) >= emptyGrace {
				clear(known)
				emit([]Target{}, nil)
			}
			emit(nil, fmt.Errorf("%s has no addresses", s.DNSSource.Name))
		default:
			emptySince = time.Time{}
			for addr := range known {
				known[addr]++
			}
			for _, addr := range a.addresses {
				known[addr] = 0
			}
			maps.DeleteFunc(known, func(_ netip.AddrPort, misses int) bool { return misses >= missesToDrop })
			emit(s.targets(known), nil)
			wait = min(wait, max(a.ttl, shortestTTL))
		}
		if !sleep(ctx, jitter(wait)) {
			return nil
		}
	}
}

func (s *dnsSource) targets(known map[netip.AddrPort]int) []Target {
	out := make([]Target, 0, len(known))
	for _, a := range slices.SortedFunc(maps.Keys(known), netip.AddrPort.Compare) {
		out = append(out, Target{URL: s.Scheme + "://" + a.String(), Weight: 1})
	}
	return out
}

// A resolver asks the name servers of resolv.conf. The standard library's does not tell how long an answer holds.
type resolver struct {
	confFile string
	port     string // of the name servers
}

// answerBytes is the UDP answer we take without falling back to TCP (DNS flag day 2020).
const answerBytes = 1232

// lookup returns the addresses behind s. An answer without any is no error; not knowing is.
func (r *resolver) lookup(ctx context.Context, s *config.DNSSource) (answer, error) {
	conf, err := dns.ClientConfigFromFile(r.confFile)
	if err != nil {
		return answer{}, fmt.Errorf("%s: %w", r.confFile, err)
	}
	if len(conf.Servers) == 0 {
		return answer{}, fmt.Errorf("%s: no name servers", r.confFile)
	}
	// As the system does: the name with each search suffix, until one exists.
	var empty answer
	for _, name := range conf.NameList(s.Name) {
		var a answer
		if s.Type == "srv" {
			a, err = r.srv(ctx, conf, name)
		} else {
			a, err = r.hosts(ctx, conf, name, uint16(s.Port))
		}
		if err != nil || len(a.addresses) > 0 {
			return a, err
		}
	}
	return empty, nil
}

// hosts returns the IPv4 addresses of name, or its IPv6 addresses if it has no others: where a server has both, it must
// not be taken for two.
func (r *resolver) hosts(ctx context.Context, conf *dns.ClientConfig, name string, port uint16) (answer, error) {
	for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
		m, err := r.ask(ctx, conf, name, qtype)
		if err != nil {
			return answer{}, err
		}
		if a := addresses(m.Answer, port); len(a.addresses) > 0 {
			return a, nil
		}
	}
	return answer{}, nil
}

// addresses collects the address records of an answer; its TTL is the shortest of all records that led to them.
func addresses(rrs []dns.RR, port uint16) (a answer) {
	a.ttl = 24 * time.Hour
	for _, rr := range rrs {
		var ip net.IP
		switch rr := rr.(type) {
		case *dns.A:
			ip = rr.A
		case *dns.AAAA:
			ip = rr.AAAA
		}
		a.ttl = min(a.ttl, time.Duration(rr.Header().Ttl)*time.Second)
		if ip, ok := netip.AddrFromSlice(ip); ok {
			a.addresses = append(a.addresses, netip.AddrPortFrom(ip.Unmap(), port))
		}
	}
	return a
}

// srv returns the addresses of all targets with the best priority (RFC 2782). If one of them cannot be resolved, the set
// is not complete, and that is an error.
func (r *resolver) srv(ctx context.Context, conf *dns.ClientConfig, name string) (answer, error) {
	m, err := r.ask(ctx, conf, name, dns.TypeSRV)
	if err != nil {
		return answer{}, err
	}
	out := answer{ttl: 24 * time.Hour}
	best := ^uint16(0)
	var records []*dns.SRV
	for _, rr := range m.Answer {
		out.ttl = min(out.ttl, time.Duration(rr.Header().Ttl)*time.Second)
		if s, ok := rr.(*dns.SRV); ok && s.Target != "." {
			records = append(records, s)
			best = min(best, s.Priority)
		}
	}
	for _, s := range records {
		if s.Priority != best {
			continue
		}
		// Servers that know the addresses mostly send them along.
		along := slices.DeleteFunc(slices.Clone(m.Extra), func(rr dns.RR) bool {
			return !strings.EqualFold(rr.Header().Name, s.Target) || rr.Header().Rrtype != dns.TypeA
		})
		a := addresses(along, s.Port)
		if len(a.addresses) == 0 {
			if a, err = r.hosts(ctx, conf, s.Target, s.Port); err != nil {
				return answer{}, err
			}
		}
		if len(a.addresses) == 0 {
			return answer{}, fmt.Errorf("%s names %s, which has no addresses", name, s.Target)
		}
		out.addresses = append(out.addresses, a.addresses...)
		out.ttl = min(out.ttl, a.ttl)
	}
	return out, nil
}

// ask puts one question to the name servers in turn, twice, until one answers it.
func (r *resolver) ask(ctx context.Context, conf *dns.ClientConfig, name string, qtype uint16) (*dns.Msg, error) {
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(name), qtype)
	q.SetEdns0(answerBytes, false)
	timeout := time.Duration(min(max(conf.Timeout, 1), 5)) * time.Second
	var last error
	for range 2 {
		for _, server := range conf.Servers {
			addr := net.JoinHostPort(server, r.port)
			m, err := exchange(ctx, "udp", addr, q, timeout)
			if err == nil && m.Truncated {
				m, err = exchange(ctx, "tcp", addr, q, timeout)
			}
			switch {
			case ctx.Err() != nil:
				return nil, ctx.Err()
			case err != nil:
				last = err
			case m.Rcode == dns.RcodeSuccess, m.Rcode == dns.RcodeNameError:
				return m, nil
			default:
				last = errors.New("name server " + server + " answers " + rcode(m.Rcode))
			}
		}
	}
	return nil, fmt.Errorf("lookup of %s %s: %w", dns.TypeToString[qtype], name, last)
}

func exchange(ctx context.Context, network, addr string, q *dns.Msg, timeout time.Duration) (*dns.Msg, error) {
	c := dns.Client{Net: network, Timeout: timeout, UDPSize: answerBytes}
	m, _, err := c.ExchangeContext(ctx, q, addr)
	return m, err
}

func rcode(n int) string {
	if s, ok := dns.RcodeToString[n]; ok {
		return s
	}
	return strconv.Itoa(n)
}
