package config

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"
)

// at finds the node of path, or of what it is in if the file does not say it.
func (d *decoder) at(path string) *yaml.Node {
	for {
		if n := d.values[path]; n != nil {
			return n
		}
		if path == "" {
			return &yaml.Node{Line: 1, Column: 1}
		}
		path = parent(path)
	}
}

// wrong notes an error at path, unless there is one already: the first says it better.
func (d *decoder) wrong(path, message, hint string) {
	if !d.bad[path] {
		d.add(d.at(path), path, message, hint)
	}
}

func (d *decoder) warn(path, message, hint string) {
	if d.bad[path] {
		return
	}
	d.add(d.at(path), path, message, hint)
	d.problems[len(d.problems)-1].Severity = Warning
}

// minTokenBytes is how long a secret must be that nobody is to guess.
const minTokenBytes = 16

// given reports whether the file says path.
func (d *decoder) given(path string) bool { return d.values[path] != nil }

// validate checks what types cannot express.
func (d *decoder) validate() {
	c := d.root
	d.listen("listen", c.Listen)
	d.listen("admin.listen", c.Admin.Listen)
	if port(c.Listen) == port(c.Admin.Listen) && port(c.Listen) > 0 && overlap(c.Listen, c.Admin.Listen) {
		of := func(path, addr string) string {
			if !d.given(path) {
				path += ", by default"
			}
			return strconv.Quote(addr) + " (" + path + ")"
		}
		d.wrong(d.first("admin.listen", "listen"), of("admin.listen", c.Admin.Listen)+" collides with "+of("listen", c.Listen), "use another port for one of the two")
	}
	d.tracing(c.Tracing)
	d.bearer("admin.token", "token", &c.Admin.Token, c.Admin.TokenFile)
	if n := len(c.Admin.Token.Reveal()); n > 0 && n < minTokenBytes {
		d.warn(d.first("admin.token_file", "admin.token"), fmt.Sprintf("the token has %d characters, which can be guessed", n), "openssl rand -hex 24 makes one")
	}
	if t := c.TLS; t != nil {
		d.certificate("tls", t.CertFile, t.KeyFile, true)
	}

	if d.given("log.access_sample_ratio") && c.Log.AccessSampleRatio != Default().Log.AccessSampleRatio && c.Log.Access != "sample" {
		d.warn("log.access_sample_ratio", "has no effect with access: "+c.Log.Access, "write access: sample, or remove it")
	}
	if c.Limits.InFlightBodyBytes < c.Limits.BodyBytes {
		d.wrong(d.first("limits.in_flight_body_bytes", "limits.body_bytes"),
			fmt.Sprintf("in_flight_body_bytes (%s) is less than body_bytes (%s), so the largest bodies could never pass", c.Limits.InFlightBodyBytes, c.Limits.BodyBytes),
			"raise in_flight_body_bytes to "+c.Limits.BodyBytes.String()+" or more")
	}
	d.waits("timeouts", c.Timeouts.EndpointTimeouts)

	if c.Health.BasePause > c.Health.MaxPause {
		d.wrong(d.first("health.base_pause", "health.max_pause"),
			fmt.Sprintf("base_pause (%s) is longer than max_pause (%s)", formatDuration(c.Health.BasePause), formatDuration(c.Health.MaxPause)),
			"raise max_pause, or lower base_pause")
	}
	if s := c.Scrape; s.Interval >= s.StaleAfter {
		d.wrong(d.first("scrape.interval", "scrape.stale_after"),
			fmt.Sprintf("interval (%s) is not shorter than stale_after (%s), so endpoints would be stale between scrapes", formatDuration(s.Interval), formatDuration(s.StaleAfter)),
			"raise stale_after to "+formatDuration(3*s.Interval)+" or more")
	} else if s.Timeout >= s.StaleAfter {
		d.wrong(d.first("scrape.timeout", "scrape.stale_after"),
			fmt.Sprintf("timeout (%s) is not shorter than stale_after (%s), so a slow scrape would be stale on arrival", formatDuration(s.Timeout), formatDuration(s.StaleAfter)),
			"raise stale_after, or lower timeout")
	}
	if host, _, _ := hostPort(c.Admin.Listen); !loopback(host) {
		asks, reload := "asks for no credentials", ", and reload it"
		if !c.Admin.Token.IsZero() || c.Admin.TokenFile != "" {
			asks, reload = "asks for credentials for actions alone", ""
		}
		d.warn("admin.listen", strconv.Quote(clip(c.Admin.Listen))+" can be reached from other machines and "+asks+": anyone there can read endpoint addresses, profiles and the configuration"+reload,
			`write "127.0.0.1:`+strconv.Itoa(port(c.Admin.Listen))+`", or keep others out with a network policy`)
	}
	if c.Debug.Headers {
		d.warn("debug.headers", "every client sees the addresses of your endpoints", "write debug: {request_header: X-Kvgate-Debug} to show them on demand")
	}
	if h := c.Debug.RequestHeader; h != "" && !headerName.MatchString(h) {
		d.wrong("debug.request_header", strconv.Quote(clip(h))+" is not a header name", "write letters, digits and \"-\"")
	}
	d.pools()
	d.names()
	d.auth()
	d.quotas()
	d.usage()
	d.record()
	d.places()
}

// places warns of files that are to be written into directories that are not there: the gateway may run elsewhere, but if it
// runs here it will say so only when it needs them.
func (d *decoder) places() {
	c := d.root
	files := map[string]string{"log.file": c.Log.File, "state.file": c.State.File}
	if c.Record != nil {
		files["record.file"] = c.Record.File
	}
	if c.Usage != nil {
		files["usage.file"] = c.Usage.File
		if c.Usage.Webhook != nil {
			files["usage.webhook.spool"] = c.Usage.Webhook.Spool
		}
	}
	for _, path := range slices.Sorted(maps.Keys(files)) {
		if files[path] == "" || d.bad[path] {
			continue
		}
		dir := filepath.Dir(files[path])
		if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
			d.warn(path, "there is no directory "+strconv.Quote(clip(dir))+" here to write it into", "make it, writable by the user that kvgate runs as; under systemd, StateDirectory and LogsDirectory do")
		}
	}
}

// first returns the first of the paths that the file says, or simply the first.
func (d *decoder) first(paths ...string) string {
	for _, p := range paths {
		if d.given(p) {
			return p
		}
	}
	return paths[0]
}

// waits checks one set of timeouts against itself.
func (d *decoder) waits(path string, t EndpointTimeouts) {
	for _, w := range []struct {
		name string
		d    int64
	}{{"connect", int64(t.Connect)}, {"first_token", int64(t.FirstToken)}, {"idle", int64(t.Idle)}} {
		if t.Total > 0 && w.d > int64(t.Total) && d.given(path+"."+w.name) {
			d.warn(path+"."+w.name, "is longer than total ("+formatDuration(t.Total)+"), so it is never reached", "raise total, or lower it")
		}
	}
	if t.EndpointIdle >= uvicornKeepAlive && d.given(path+".endpoint_idle") {
		d.warn(path+".endpoint_idle", formatDuration(t.EndpointIdle)+" is not shorter than the 5s after which uvicorn (vLLM, SGLang) closes idle connections",
			`write "4s" unless your servers keep them longer`)
	}
}

// uvicornKeepAlive is uvicorn's timeout_keep_alive default.
const uvicornKeepAlive = 5e9

var (
	headerName = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}$") // RFC 9110 §5.6.2
	poolName   = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	label      = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*$`)
	series     = regexp.MustCompile(`^[a-zA-Z_:][a-zA-Z0-9_:]*(\{\s*[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"(\\.|[^"\\])*"\s*,?\s*\})?$`)
)

func (d *decoder) pools() {
	c := d.root
	if len(c.Pools) == 0 {
		d.wrong("pools", "there are no pools", "write at least one, with name and discovery")
	}
	names := map[string]int{}
	models := map[string]string{} // to the path that has it
	urls := map[string]string{}
	for i := range c.Pools {
		p := &c.Pools[i]
		at := fmt.Sprintf("pools[%d]", i)
		if !d.bad[at] {
			d.pool(at, p, names, models, urls)
		}
		if _, ok := names[p.Name]; !ok {
			names[p.Name] = i
		}
	}
}

func (d *decoder) pool(at string, p *Pool, names map[string]int, models, urls map[string]string) {
	j, taken := names[p.Name]
	switch {
	case p.Name == "":
		d.wrong(at+".name", "a pool needs a name", "write name: …")
	case !poolName.MatchString(p.Name):
		d.wrong(at+".name", strconv.Quote(clip(p.Name))+" is not a pool name", `write at most 63 letters, digits, ".", "_" and "-"`)
	case taken:
		d.wrong(at+".name", fmt.Sprintf("%q is the name of pools[%d] already", p.Name, j), "give each pool its own")
	}
	for k, m := range p.Models {
		mp := fmt.Sprintf("%s.models[%d]", at, k)
		if m == "" {
			continue // complained about
		}
		if other, ok := models[m]; ok {
			d.wrong(mp, fmt.Sprintf("%q is at %s already", m, other), "a model belongs to one pool, once; list all its endpoints there")
			continue
		}
		models[m] = mp
	}
	d.policy(at+".policy", &p.Policy)
	if d.given(at + ".timeouts") { // else they are the ones above, which have been checked
		d.waits(at+".timeouts", p.Timeouts)
	}
	d.discovery(at+".discovery", p, urls)
	d.admission(at+".admission", p)
	d.adapters(at+".adapters", p, models)

	custom := p.Dialect == "custom"
	for _, e := range p.Discovery.Static {
		custom = custom || e.Dialect == "custom"
	}
	switch {
	case custom && p.Custom == nil:
		d.wrong(at+".dialect", "dialect custom needs to be told which series mean what", "add the key custom to this pool")
	case !custom && p.Custom != nil && !d.bad[at+".dialect"]:
		d.wrong(at+".custom", "has no effect with dialect: "+p.Dialect, "write dialect: custom")
	case p.Custom != nil:
		d.custom(at+".custom", p.Custom)
	}

	if t := p.TLS; t != nil {
		tp := at + ".tls"
		d.certificate(tp, t.CertFile, t.KeyFile, false)
		if data := d.read(tp+".ca_file", t.CAFile); data != nil && !x509.NewCertPool().AppendCertsFromPEM(data) {
			d.wrong(tp+".ca_file", "holds no certificate", "name a file with PEM certificates")
		}
		if t.InsecureSkipVerify {
			d.warn(tp+".insecure_skip_verify", "certificates of endpoints are not verified", "use ca_file instead")
		}
	}
	d.bearer(at+".api_key", "key", &p.APIKey, p.APIKeyFile)
}

// bearer reads the secret at path from its file, if it has one, and checks that it can be a bearer token. what names it.
func (d *decoder) bearer(path, what string, s *Secret, file string) {
	inFile := path + "_file"
	if !s.IsZero() && file != "" {
		d.wrong(inFile, "there is "+path[strings.LastIndexByte(path, '.')+1:]+" too", "keep one of the two")
	} else if file != "" {
		if data := d.read(inFile, file); data != nil {
			*s = NewSecret(strings.TrimSpace(string(data)))
			if s.IsZero() {
				d.wrong(inFile, "the file is empty", "put the "+what+" into it")
			}
		}
	}
	for _, b := range []byte(s.Reveal()) {
		if b <= ' ' || b >= 0x7f {
			d.wrong(d.first(inFile, path), "the "+what+" holds characters that a header can't", what+"s are printable ASCII without spaces")
			break
		}
	}
}

func (d *decoder) policy(at string, p *Policy) {
	switch {
	case p.Weights == nil && !d.bad[at+".weights"]:
		return
	case d.given(at + ".name"):
		d.wrong(at+".name", "a policy has a name or weights, not both", "remove one of the two")
		return
	}
	p.Name = "" // the default
	sum := 0.0
	for _, w := range p.Weights {
		sum += w
	}
	if sum == 0 && !d.badBelow[at+".weights"] {
		d.wrong(at+".weights", "no scorer has a weight above 0, so no endpoint would be better than another", "give one a weight, or write policy: auto")
	}
}

func (d *decoder) discovery(at string, p *Pool, urls map[string]string) {
	s := &p.Discovery
	if len(s.Static) == 0 && s.File == nil && s.DNS == nil && s.Kubernetes == nil && !d.badBelow[at] {
		d.wrong(at, "a pool needs endpoints", `write discovery: {static: ["http://10.0.0.11:8000"]}`)
	}
	for k := range s.Static {
		e, ep := &s.Static[k], fmt.Sprintf("%s.static[%d]", at, k)
		up := ep
		if d.given(ep + ".url") {
			up = ep + ".url"
		}
		if d.bad[up] {
			continue
		}
		if e.URL == "" {
			d.wrong(ep+".url", "an endpoint needs a url", `write url: "http://10.0.0.11:8000"`)
			continue
		}
		norm, message, hint := CheckURL(e.URL)
		if message != "" {
			d.wrong(up, message, hint)
			continue
		}
		e.URL = norm
		if other, ok := urls[norm]; ok {
			d.wrong(up, fmt.Sprintf("%q is at %s already", norm, other), "list each endpoint once")
		} else {
			urls[norm] = up
		}
		if e.MetricsURL != "" {
			if u, err := url.Parse(e.MetricsURL); err != nil || u.Host == "" || u.User != nil || u.Scheme != "http" && u.Scheme != "https" {
				d.wrong(ep+".metrics_url", strconv.Quote(clip(hideUser(e.MetricsURL)))+" is not a URL", `write one such as "http://10.0.0.11:8000/metrics"`)
			}
		}
	}
	if f := s.File; f != nil && f.Path == "" {
		d.wrong(at+".file.path", "has no path", "write file: targets.yaml")
	}
	if s := s.DNS; s != nil {
		switch {
		case s.Name == "":
			d.wrong(at+".dns.name", "has no name", "write dns: {name: …, port: …}")
		case !hostName.MatchString(s.Name):
			d.wrong(d.first(at+".dns.name", at+".dns"), strconv.Quote(clip(s.Name))+" is not a host name", "write it without scheme, port and path")
		}
		if s.Type == "a" && s.Port == 0 && !d.bad[at+".dns.port"] {
			d.wrong(at+".dns.port", "records of type a hold no port", "write port: 8000")
		}
		if s.Type == "srv" && s.Port != 0 {
			d.wrong(at+".dns.port", "records of type srv hold the port", "remove it")
		}
	}
	if s := s.Kubernetes; s != nil {
		d.kubernetes(at+".kubernetes", s)
	}
}

// kubernetes checks what can be told without an API server.
func (d *decoder) kubernetes(at string, s *KubernetesSource) {
	var given []string
	for _, k := range []struct{ key, value string }{
		{"service", s.Service}, {"selector", s.Selector}, {"inference_pool", s.InferencePool},
	} {
		if k.value != "" {
			given = append(given, k.key)
		}
	}
	switch {
	case len(given) == 0 && !d.badBelow[at]:
		d.wrong(at, "does not say which endpoints", `write one of service: NAME, selector: "app=NAME" and inference_pool: NAME`)
	case len(given) > 1:
		d.wrong(at+"."+given[1], "there is "+given[0]+" too", "keep one of the two; another pool may have the other")
	}
	name := func(key, value, what string) {
		if value != "" && !objectName.MatchString(value) {
			d.wrong(at+"."+key, strconv.Quote(clip(value))+" is not the name of "+what, `write lower-case letters, digits and "-"`)
		}
	}
	name("service", s.Service, "a Service")
	name("inference_pool", s.InferencePool, "an InferencePool")
	seen := map[string]bool{}
	for i, ns := range s.Namespaces {
		key := fmt.Sprintf("namespaces[%d]", i)
		switch {
		case ns == "*":
			d.wrong(at+"."+key, "all namespaces cannot be watched at once", "list them, and apply deploy/rbac in each")
		case seen[ns]:
			d.wrong(at+"."+key, strconv.Quote(clip(ns))+" is listed twice", "remove one")
		default:
			name(key, ns, "a namespace")
		}
		seen[ns] = true
	}
	if s.Selector != "" && !selector.MatchString(s.Selector) {
		d.wrong(at+".selector", strconv.Quote(clip(s.Selector))+" is not a label selector", `write it as kubectl get pods -l takes it, such as "app=llama,tier in (prod, canary)"`)
	}
	if s.Port != "" {
		if n, err := strconv.Atoi(s.Port); err == nil && (n < 1 || n > 65535) || err != nil && !portName.MatchString(s.Port) {
			d.wrong(at+".port", strconv.Quote(clip(s.Port))+" is not a port", "write its name or its number")
		}
		if s.InferencePool != "" {
			d.wrong(at+".port", "the InferencePool holds the ports", "remove it")
		}
	}
}

// What Kubernetes takes for the name of a Service, a namespace or, with dots, most objects (RFC 1123), and for a port's.
var (
	objectName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)
	portName   = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	selector   = func() *regexp.Regexp {
		const (
			key   = `([A-Za-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?`
			value = `([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?`
			set   = `\(\s*` + value + `(\s*,\s*` + value + `)*\s*\)`
			one   = `\s*(!\s*` + key + `|` + key + `(\s*(=|==|!=)\s*` + value + `|\s+(in|notin)\s*` + set + `)?)\s*`
		)
		return regexp.MustCompile(`^` + one + `(,` + one + `)*$`)
	}()
)

var hostName = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?$`)

// CheckURL checks the URL of an endpoint: scheme, host, port, and nothing else. It returns the URL in its normal form,
// or what is wrong with it and what to write.
func CheckURL(s string) (norm, message, hint string) {
	shown := strconv.Quote(clip(hideUser(s)))
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok {
		if h, _, bad := hostPort(s); bad == "" && h != "" {
			return "", shown + " has no scheme", "write " + strconv.Quote("http://"+s)
		}
		return "", shown + " is not a URL", `write one such as "http://10.0.0.11:8000"`
	}
	if l := strings.ToLower(scheme); l != "http" && l != "https" {
		return "", shown + " has the scheme " + strconv.Quote(clip(scheme)), "write http:// or https://"
	}
	u, err := url.Parse(s)
	if err != nil {
		return "", shown + " is not a URL", `write one such as "http://10.0.0.11:8000"`
	}
	base := strings.ToLower(u.Scheme) + "://" + strings.ToLower(u.Host)
	base = strings.TrimSuffix(base, map[string]string{"http": ":80", "https": ":443"}[strings.ToLower(u.Scheme)])
	switch {
	case u.User != nil:
		return "", shown + " holds a user name or password", "write " + strconv.Quote(base) + ", and the key in api_key"
	case u.Path != "" && u.Path != "/":
		hint := "write " + strconv.Quote(base)
		if strings.HasPrefix(u.Path, "/v1") {
			hint += "; kvgate adds the path of each request"
		}
		return "", shown + " has a path", hint
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.Contains(rest, "#"):
		return "", shown + " has a query or a fragment", "write " + strconv.Quote(base)
	}
	host, _, bad := hostPort(u.Host)
	if bad != "" || host == "" || u.Port() == "0" {
		return "", shown + " has no valid host and port", `write one such as "http://10.0.0.11:8000"`
	}
	return base, "", ""
}

// hideUser removes user name and password, which must not get into messages.
func hideUser(s string) string {
	i := strings.LastIndexByte(s, '@')
	if i < 0 {
		return s
	}
	scheme := ""
	if j := strings.Index(s, "://"); j >= 0 && j < i {
		scheme = s[:j+3]
	}
	return scheme + redacted + s[i:]
}

// hostPort splits host:port, host or [v6]:port. bad says what is wrong with it.
func hostPort(s string) (host string, port int, bad string) {
	host = s
	if i := strings.LastIndexByte(s, ':'); i >= 0 && !strings.Contains(s[i:], "]") {
		host = s[:i]
		n, err := strconv.ParseUint(s[i+1:], 10, 32)
		if err != nil || s[i+1] == '+' {
			return "", 0, strconv.Quote(clip(s[i+1:])) + " is not a port"
		}
		if n > 65535 {
			return "", 0, fmt.Sprintf("port %d is above 65535", n)
		}
		port = int(n)
	}
	if in, ok := strings.CutPrefix(host, "["); ok {
		in, ok = strings.CutSuffix(in, "]")
		if a, err := netip.ParseAddr(in); !ok || err != nil || !a.Is6() {
			return "", 0, strconv.Quote(clip(host)) + " is not an IPv6 address in brackets"
		}
		return host, port, ""
	}
	if host != "" && !hostName.MatchString(host) {
		return "", 0, strconv.Quote(clip(host)) + " is not a host"
	}
	return host, port, ""
}

func (d *decoder) listen(path, s string) {
	if d.bad[path] {
		return
	}
	shown := strconv.Quote(clip(s))
	if _, err := strconv.ParseUint(s, 10, 16); err == nil {
		if path == "admin.listen" {
			s = "127.0.0.1:" + s
		} else {
			s = ":" + s
		}
		d.wrong(path, shown+" is not an address", "write "+strconv.Quote(s))
		return
	}
	if strings.Contains(s, "://") {
		d.wrong(path, shown+" has a scheme", `write host and port, such as ":8080"`)
		return
	}
	if a, err := netip.ParseAddr(s); err == nil && a.Is6() {
		d.wrong(path, shown+" has no port", "write "+strconv.Quote(net.JoinHostPort(s, "8080")))
		return
	}
	if _, _, bad := hostPort(s); bad != "" {
		d.wrong(path, shown+" is not an address: "+bad, `write host and port, such as ":8080"`)
		return
	}
	if _, _, err := net.SplitHostPort(s); err != nil {
		d.wrong(path, shown+" has no port", "write "+strconv.Quote(s+":8080"))
	}
}

func port(addr string) int {
	_, p, _ := hostPort(addr)
	return p
}

// loopback reports whether only this machine can reach host.
func loopback(host string) bool {
	a, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return host == "localhost" || err == nil && a.IsLoopback()
}

// overlap reports whether two addresses with the same port cannot both be listened on.
func overlap(a, b string) bool {
	ha, _, _ := hostPort(a)
	hb, _, _ := hostPort(b)
	every := func(h string) bool { return h == "" || h == "0.0.0.0" || h == "[::]" }
	return ha == hb || every(ha) || every(hb)
}

func (d *decoder) custom(at string, c *Custom) {
	if !strings.HasPrefix(c.Path, "/") {
		d.wrong(at+".path", strconv.Quote(clip(c.Path))+" is not a path", `write one that begins with "/"`)
	}
	none := true
	for _, f := range []struct{ key, value string }{
		{"running", c.Running},
		{"waiting", c.Waiting},
		{"kv_cache_utilization", c.KVCacheUtilization},
		{"kv_used", c.KVUsed},
		{"kv_total", c.KVTotal},
		{"kv_capacity_tokens", c.KVCapacityTokens},
		{"adapters", c.Adapters},
		{"max_adapters", c.MaxAdapters},
	} {
		none = none && f.value == ""
		if f.value != "" && !series.MatchString(f.value) {
			d.wrong(at+"."+f.key, strconv.Quote(clip(f.value))+" is not a series", `write name, or name{label="value"} with one label`)
		}
	}
	if none && !d.badBelow[at] {
		d.wrong(at, "maps no series", "write at least one, such as waiting")
	}
	for _, f := range []struct {
		key   string
		given bool
		other string
		there bool
	}{
		{"kv_used", c.KVUsed != "", "kv_total", c.KVTotal != ""},
		{"block_tokens", c.BlockTokens != 0, "kv_total", c.KVTotal != ""},
		{"adapters", c.Adapters != "", "adapters_label", c.AdaptersLabel != ""},
		{"adapters_label", c.AdaptersLabel != "", "adapters", c.Adapters != ""},
	} {
		if f.given && !f.there {
			d.wrong(at+"."+f.key, "has no effect without "+f.other, "write that too")
		}
	}
	for _, f := range []struct{ key, value string }{{"adapters_label", c.AdaptersLabel}, {"engine_label", c.EngineLabel}} {
		if f.value != "" && !label.MatchString(f.value) {
			d.wrong(at+"."+f.key, strconv.Quote(clip(f.value))+" is not a label", "write letters, digits and \"_\"")
		}
	}
}

// certificate checks a certificate and its key, if any.
func (d *decoder) certificate(at, certFile, keyFile string, required bool) {
	switch {
	case certFile == "" && (required || keyFile != ""):
		d.wrong(at+".cert_file", "is missing", "name the file with the certificate")
		return
	case keyFile == "" && certFile != "":
		d.wrong(at+".key_file", "is missing", "name the file with the certificate's key")
		return
	}
	cert, key := d.read(at+".cert_file", certFile), d.read(at+".key_file", keyFile)
	if cert == nil || key == nil {
		return
	}
	if _, err := tls.X509KeyPair(cert, key); err != nil {
		d.wrong(at+".cert_file", "certificate and key can't be used: "+strings.TrimPrefix(err.Error(), "tls: "), "check that both are PEM and belong together")
	}
}

// maxSecretBytes bounds files with keys and certificates; a bundle of all public authorities takes 230 KiB.
const maxSecretBytes = 1 << 20

// read returns what a file that must be readable holds; nil if there is none, or it is unusable, which it notes.
func (d *decoder) read(path, name string) []byte {
	if name == "" || d.bad[path] {
		return nil
	}
	data, err := readRegular(name)
	if err != nil {
		d.wrong(path, strconv.Quote(clip(name))+" cannot be read: "+reason(err), "check the path and the permissions")
		return nil
	}
	return data
}

func readRegular(name string) ([]byte, error) {
	// Look before opening: a pipe would block, a device might never end.
	switch st, err := os.Stat(name); {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, fmt.Errorf("it is not a regular file")
	case st.Size() > maxSecretBytes:
		return nil, fmt.Errorf("it is larger than %s", Bytes(maxSecretBytes))
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSecretBytes))
	if data == nil {
		data = []byte{}
	}
	return data, err
}

// inputs identifies everything the configuration was made from.
func (d *decoder) inputs(data []byte) string {
	h := sha256.New()
	part := func(b []byte) {
		fmt.Fprintf(h, "%d:", len(b))
		h.Write(b)
	}
	part(data)
	file := func(name string) {
		if name != "" {
			b, _ := ReadFile(name, maxFileBytes+1)
			part(b)
		}
	}
	if t := d.root.TLS; t != nil {
		file(t.CertFile)
		file(t.KeyFile)
	}
	if a := d.root.Auth; a != nil {
		file(a.KeysFile)
		if a.JWT != nil {
			file(a.JWT.JWKSFile)
		}
	}
	if r := d.root.Quotas.Redis; r != nil {
		part([]byte(r.URL.Reveal()))
	}
	if u := d.root.Usage; u != nil && u.Webhook != nil {
		part([]byte(u.Webhook.Token.Reveal()))
	}
	part([]byte(d.root.Admin.Token.Reveal()))
	if t := d.root.Tracing; t != nil {
		part([]byte(t.Authorization.Reveal()))
	}
	for _, p := range d.root.Pools {
		part([]byte(p.APIKey.Reveal()))
		if t := p.TLS; t != nil {
			file(t.CAFile)
			file(t.CertFile)
			file(t.KeyFile)
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}
