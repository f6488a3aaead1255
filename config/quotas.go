package config

import (
	_ "embed"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"
)

//go:embed quotas.go
var quotasSource string

func init() { sources = append(sources, quotasSource) }

// Quotas say how much may be used.
type Quotas struct {
	// Limits are limits of tenants, all of which a request must keep; keys may have more of their own. Where authentication
	// is off, all requests are of one tenant without a name.
	Limits []TenantLimit `yaml:"limits" example:""`
	// AssumedOutputTokens are charged for the output of a request that sets no limit to it, until it is known. Danger: where
	// less is assumed than comes, requests that run at the same time can together exceed a limit; later ones pay for it.
	AssumedOutputTokens int `yaml:"assumed_output_tokens" min:"1" max:"1000000"`
	// Headers tells clients in x-ratelimit-limit-*, -remaining-* and -reset-* what the limit with the least left says.
	Headers bool `yaml:"headers"`
	// Redis shares the counts with other gateways through Redis or Valkey, but for concurrent, which each counts by itself.
	Redis *Redis `yaml:"redis" example:""`
}

// TenantLimit is a limit of tenants.
type TenantLimit struct {
	// Tenant is whose limit it is: a name, or a pattern such as *. Each tenant that matches has the whole limit for itself.
	Tenant string `yaml:"tenant"`
	Limit  `yaml:",inline"`
}

// Limit is how much may be used within a window that slides. At least one of its numbers is needed.
type Limit struct {
	// Models are the models and adapters that it is about, by names and patterns; without it, all. They share the limit.
	Models []string `yaml:"models" example:"[llama-*]"`
	// PerModel gives each of them the limit for itself.
	PerModel bool `yaml:"per_model"`
	// Window is the time in which the amounts below may be used, at once or spread out: what is used comes back evenly.
	Window time.Duration `yaml:"window" min:"1s" max:"744h"`
	// Requests is the number of requests.
	Requests int `yaml:"requests" example:"600" min:"1" max:"1000000000"`
	// InputTokens is the number of prompt tokens, cached ones included.
	InputTokens int `yaml:"input_tokens" example:"1000000" min:"1" max:"1000000000000"`
	// OutputTokens is the number of generated tokens.
	OutputTokens int `yaml:"output_tokens" example:"200000" min:"1" max:"1000000000000"`
	// TotalTokens is the number of both together.
	TotalTokens int `yaml:"total_tokens" example:"1000000" min:"1" max:"1000000000000"`
	// Concurrent is the number of requests at a time, whatever the window.
	Concurrent int `yaml:"concurrent" example:"32" min:"1" max:"1000000"`
}

// Redis is where gateways share their counts.
type Redis struct {
	// URL is the address of one server: redis://user:password@host:6379/0, or rediss:// for TLS. ${NAME} is taken from the
	// environment.
	URL Secret `yaml:"url" example:"redis://127.0.0.1:6379/0"`
	// Addresses are, instead, nodes of a Redis Cluster to begin with, or with master its sentinels.
	Addresses []string `yaml:"addresses" example:"[10.0.0.1:6379, 10.0.0.2:6379]"`
	// Master is the name by which the sentinels at addresses know the server. They are asked without a password.
	Master string `yaml:"master" example:"mymaster"`
	// Username is who the gateway is to the servers at addresses; without it, their default user.
	Username string `yaml:"username" example:"kvgate"`
	// Password is for the servers at addresses. ${NAME} is taken from the environment.
	Password Secret `yaml:"password" example:"${REDIS_PASSWORD}"`
	// PasswordFile holds that password instead, in a file; white space around it is ignored.
	PasswordFile string `yaml:"password_file" example:"/etc/kvgate/redis.password" path:"read"`
	// TLS has the servers at addresses spoken to over TLS: {} verifies them by the system's authorities.
	TLS *EndpointTLS `yaml:"tls" example:""`
	// Timeout is how long one look may take. Requests wait for it.
	Timeout time.Duration `yaml:"timeout" min:"1ms" max:"5s"`
	// OnFailure is open (while it can't be asked, each gateway enforces the limits by itself) or closed (requests that have
	// limits are refused).
	OnFailure string `yaml:"on_failure" enum:"open,closed"`
	// Prefix begins the names of its keys.
	Prefix string `yaml:"prefix"`
}

func (t *TenantLimit) setDefaults(c *Config) {
	t.Tenant = "*"
	t.Limit.setDefaults(c)
}

func (l *Limit) setDefaults(*Config) { l.Window = time.Minute }

func (r *Redis) setDefaults(*Config) {
	r.Timeout, r.OnFailure, r.Prefix = 50*time.Millisecond, "open", "kvgate:"
}

// Usage says where a record of each request's usage goes, for billing.
type Usage struct {
	// File gets a line of JSON per request. A reload opens it anew, which suits log rotation.
	File string `yaml:"file" example:"/var/lib/kvgate/usage.jsonl" path:"any"`
	// Webhook gets them in batches.
	Webhook *Webhook `yaml:"webhook" example:""`
}

// Webhook is a web server that takes batches of usage records: POST, lines of JSON, status 2xx once it has them.
type Webhook struct {
	// URL is where they are posted.
	URL string `yaml:"url" example:"https://billing.example.com/usage"`
	// Token is sent as "Authorization: Bearer …". ${NAME} is taken from the environment.
	Token Secret `yaml:"token" example:"${A_KEY}"`
	// Interval is how long a record waits for others to be sent with.
	Interval time.Duration `yaml:"interval" min:"100ms" max:"1h"`
	// Spool is a file that holds what could not be sent when the gateway stopped; it is sent after the next start.
	Spool string `yaml:"spool" example:"/var/lib/kvgate/usage.spool" path:"any"`
}

func (w *Webhook) setDefaults(*Config) { w.Interval = 5 * time.Second }

// quotas checks the section quotas.
func (d *decoder) quotas() {
	q := &d.root.Quotas
	for i := range q.Limits {
		t := &q.Limits[i]
		at := fmt.Sprintf("quotas.limits[%d]", i)
		if d.bad[at] {
			continue
		}
		d.limit(at, &t.Limit)
		if d.root.Auth == nil && t.Tenant != "*" && !d.bad[at+".tenant"] {
			d.warn(at+".tenant", "has no effect without auth: no request has a tenant", `write auth, or tenant: "*" for all requests together`)
		}
	}
	if r := q.Redis; r != nil && !d.bad["quotas.redis"] {
		d.redisNodes(r)
		switch u, err := url.Parse(r.URL.Reveal()); {
		case len(r.Addresses) > 0 || d.badBelow["quotas.redis.addresses"]:
		case d.bad["quotas.redis.url"], r.URL.Reveal() == redacted: // a dump is a file as well
		case r.URL.IsZero():
			d.wrong("quotas.redis.url", "has no url", `write url: "redis://127.0.0.1:6379/0"`)
		case err != nil || u.Host == "" && u.Scheme != "unix" || u.Scheme != "redis" && u.Scheme != "rediss" && u.Scheme != "unix":
			d.wrong("quotas.redis.url", "is not the URL of a Redis server", `write one such as "redis://127.0.0.1:6379/0"`)
		}
		limited := len(q.Limits) > 0
		for i := range d.root.Keys() {
			limited = limited || len(d.root.Keys()[i].Limits) > 0
		}
		if !limited {
			d.warn("quotas.redis", "has no effect without limits", "write quotas.limits, or limits of keys")
		}
	}
}

// redisNodes checks what r says of a cluster or of sentinels.
func (d *decoder) redisNodes(r *Redis) {
	const at = "quotas.redis"
	if len(r.Addresses) == 0 && !d.badBelow[at+".addresses"] {
		for _, k := range []string{"master", "username", "password", "password_file", "tls"} {
			if d.given(at + "." + k) {
				d.wrong(at+"."+k, "is for addresses, and there are none", "write addresses, or put it into url")
			}
		}
		return
	}
	if !r.URL.IsZero() {
		d.wrong(at+".addresses", "there is url too", "keep one of the two")
	}
	for i, a := range r.Addresses {
		host, port, err := net.SplitHostPort(a)
		if n, bad := strconv.Atoi(port); err != nil || host == "" || bad != nil || n < 1 || n > 65535 {
			d.wrong(fmt.Sprintf("%s.addresses[%d]", at, i), strconv.Quote(clip(a))+" is not host:port", `write one such as "10.0.0.1:6379"`)
		}
	}
	switch {
	case !r.Password.IsZero() && r.PasswordFile != "":
		d.wrong(at+".password_file", "there is password too", "keep one of the two")
	case r.PasswordFile != "":
		if data := d.read(at+".password_file", r.PasswordFile); data != nil {
			if r.Password = NewSecret(strings.TrimSpace(string(data))); r.Password.IsZero() {
				d.wrong(at+".password_file", "the file is empty", "put the password into it")
			}
		}
	}
}

func (d *decoder) limit(at string, l *Limit) {
	if d.bad[at] {
		return
	}
	if l.Requests+l.InputTokens+l.OutputTokens+l.TotalTokens+l.Concurrent == 0 && !d.badBelow[at] {
		d.wrong(at, "limits nothing", "write requests, input_tokens, output_tokens, total_tokens or concurrent")
	}
	for _, n := range []struct {
		key string
		n   int
	}{{"input_tokens", l.InputTokens}, {"output_tokens", l.OutputTokens}} {
		if l.TotalTokens > 0 && n.n > l.TotalTokens {
			d.warn(at+"."+n.key, "is more than total_tokens ("+strconv.Itoa(l.TotalTokens)+"), so it is never reached", "raise total_tokens, or remove it")
		}
	}
	if l.PerModel && len(l.Models) == 1 && !IsPattern(l.Models[0]) {
		d.warn(at+".per_model", "has no effect with one model", "remove it")
	}
	d.patterns(at+".models", l.Models)
}

// IsPattern reports whether a name in the configuration stands for several: it has a * or ? in it.
func IsPattern(s string) bool {
	for _, c := range s {
		if c == '*' || c == '?' {
			return true
		}
	}
	return false
}

// usage checks the section usage.
func (d *decoder) usage() {
	if d.root.Usage == nil || d.bad["usage"] {
		return
	}
	if d.root.Usage.File == "" && d.root.Usage.Webhook == nil && !d.badBelow["usage"] {
		d.wrong("usage", "goes nowhere", "write file or webhook, or remove usage")
	}
	w := d.root.Usage.Webhook
	if w == nil || d.bad["usage.webhook"] {
		return
	}
	u, err := url.Parse(w.URL)
	switch {
	case w.URL == "" && !d.bad["usage.webhook.url"]:
		d.wrong("usage.webhook.url", "has no url", `write url: "https://billing.example.com/usage"`)
	case w.URL != "" && (err != nil || u.Host == "" || u.User != nil || u.Scheme != "http" && u.Scheme != "https"):
		d.wrong("usage.webhook.url", strconv.Quote(clip(hideUser(w.URL)))+" is not a URL", `write one such as "https://billing.example.com/usage", and its secret in token`)
	}
	if w.Spool == "" && d.root.Usage.File == "" {
		d.warn("usage.webhook", "what it has not taken when the gateway stops is lost", "write spool, or usage.file as well")
	}
}
