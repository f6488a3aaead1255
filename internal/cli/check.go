package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"kvgate/config"
	"kvgate/internal/gateway"
	"kvgate/pool"
)

// A checkReport is the output of check --json.
type checkReport struct {
	OK        bool                `json:"ok"`
	Files     []checkedFile       `json:"files"`
	Problems  config.Problems     `json:"problems"` // of all files
	Endpoints []pool.EndpointView `json:"endpoints"`
	Notes     map[string][]string `json:"notes,omitempty"` // by endpoint ID: what is odd about its metrics page
}

// A checkedFile is what check says of one file.
type checkedFile struct {
	File      string   `json:"file"`
	OK        bool     `json:"ok"`
	Pools     int      `json:"pools"`
	Endpoints int      `json:"endpoints"` // in static lists
	Policies  []string `json:"policies,omitempty"`
}

func newCheck(e *env) *cobra.Command {
	var probe, asJSON, strict bool
	var timeout time.Duration
	c := &cobra.Command{
		Use:     "check FILE... [--probe] [--json] [--strict]",
		Aliases: []string{"validate", "check-config"},
		Short:   "Check configuration files, and with --probe the servers they name",
		Long: `Check configuration files: every mistake in one run, each with its place, what was found and what to write.
With --probe it also looks once at every endpoint, the way serve would, and says what it understood. Nothing is served.`,
		Example: `  kvgate check config.yaml
  kvgate check --probe config.yaml
  kvgate check --probe --json config.yaml | jq '.endpoints[] | {url, dialect, load}'`,
		Args: atLeastOne("a configuration file"),
		RunE: func(c *cobra.Command, args []string) error {
			return check(c.Context(), e, args, checkOptions{probe, asJSON, strict, timeout})
		},
	}
	fl := c.Flags()
	fl.BoolVar(&probe, "probe", false, "also look at every endpoint once; one that cannot be reached is a failure")
	fl.BoolVar(&asJSON, "json", false, "print JSON, and nothing else, on standard output")
	fl.BoolVar(&strict, "strict", false, "exit with 3 if there are warnings")
	fl.DurationVar(&timeout, "timeout", 15*time.Second, "with --probe: wait this long for all endpoints")
	return c
}

type checkOptions struct {
	probe, json, strict bool
	timeout             time.Duration
}

func check(ctx context.Context, e *env, files []string, o checkOptions) error {
	rep := checkReport{OK: true, Problems: config.Problems{}, Endpoints: []pool.EndpointView{}}
	out := e.stdout
	if o.json {
		out = io.Discard
	}
	failed, unread, probed := 0, 0, 0 // files with mistakes; endpoints that could not be read, of how many
	for _, file := range files {
		f := checkedFile{File: file}
		cfg, err := config.Load(file, gateway.ConfigOptions())
		if err == nil {
			rep.Problems = append(rep.Problems, cfg.Warnings()...)
			for _, w := range cfg.Warnings() {
				fmt.Fprintln(out, w.Error())
			}
			err = gateway.Check(cfg)
		}
		if err != nil {
			ps, ok := errors.AsType[config.Problems](err)
			if !ok {
				ps = config.Problems{{File: file, Message: err.Error(), Severity: config.Error}}
			}
			rep.Problems = append(rep.Problems, ps...)
			fmt.Fprintln(out, ps.Error())
			fmt.Fprintf(out, "%s in %s\n", count(len(ps.Errors()), "problem"), file)
			rep.Files, rep.OK = append(rep.Files, f), false
			failed++
			continue
		}
		f.OK, f.Pools = true, len(cfg.Pools)
		for i := range cfg.Pools {
			f.Endpoints += len(cfg.Pools[i].Discovery.Static)
			f.Policies = append(f.Policies, policyName(&cfg.Pools[i].Policy))
		}
		rep.Files = append(rep.Files, f)
		fmt.Fprintf(out, "%s: ok: %s, %s, policy %s\n", file, count(f.Pools, "pool"), count(f.Endpoints, "endpoint"), strings.Join(f.Policies, ", "))
		if o.probe {
			ok, bad, all := probe(ctx, cfg, o, out, &rep)
			if !ok {
				failed++
			}
			unread, probed = unread+bad, probed+all
			rep.OK = rep.OK && ok && bad == 0
		}
	}
	if o.json {
		if err := printJSON(e, rep); err != nil {
			return err
		}
	}
	switch {
	case !rep.OK && o.json:
		return exitError{code: exitFailed} // standard output has said it
	case !rep.OK:
		var what []string
		if failed > 0 {
			what = append(what, fmt.Sprintf("%d of %s failed the check", failed, count(len(files), "file")))
		}
		if unread > 0 {
			what = append(what, fmt.Sprintf("%d of %s could not be read", unread, count(probed, "endpoint")))
		}
		return exitError{exitFailed, errors.New(strings.Join(what, "; "))}
	case o.strict && len(rep.Problems.Warnings()) > 0:
		return exitError{code: exitWarnings}
	}
	return nil
}

// probe looks at cfg's endpoints. It reports whether what cfg says fits them, and how many of them could not be read.
func probe(ctx context.Context, cfg *config.Config, o checkOptions, out io.Writer, rep *checkReport) (ok bool, unread, all int) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	found, err := gateway.Probe(ctx, cfg)
	looks := found.Looks
	ok = err == nil && len(looks) > 0
	if err != nil {
		rep.Problems = append(rep.Problems, config.Problem{File: cfg.File(), Message: err.Error(), Severity: config.Error})
		fmt.Fprintf(out, "%s: %v\n", cfg.File(), err)
	}
	if err == nil && len(looks) == 0 {
		p := config.Problem{File: cfg.File(), Message: "discovery finds no endpoint", Severity: config.Error}
		rep.Problems = append(rep.Problems, p)
		fmt.Fprintln(out, p.Error())
	}
	rep.Problems = append(rep.Problems, found.Problems...)
	ok = ok && len(found.Problems.Errors()) == 0
	for _, p := range found.Problems {
		fmt.Fprintln(out, p.Error())
	}
	var views []pool.EndpointView
	for i := range looks {
		l := &looks[i]
		views = append(views, l.View)
		if len(l.Notes) > 0 {
			if rep.Notes == nil {
				rep.Notes = make(map[string][]string)
			}
			rep.Notes[l.View.ID] = l.Notes
		}
		if l.View.Error != "" {
			unread++
		}
	}
	rep.Endpoints = append(rep.Endpoints, views...)
	if len(views) > 0 {
		fmt.Fprintln(out)
		endpointTable(out, views)
	}
	for i := range looks {
		l := &looks[i]
		fmt.Fprintf(out, "\n%s: ", l.View.ID)
		if l.View.Error != "" {
			fmt.Fprintf(out, "%s\n", l.View.Error)
		} else {
			fmt.Fprintf(out, "speaks %s; models: %s\n", l.View.Dialect, cmp.Or(strings.Join(l.View.Models, ", "), "none"))
		}
		if len(l.Understood) > 0 {
			fmt.Fprintf(out, "  understood: %s\n", strings.Join(l.Understood, ", "))
		}
		if len(l.Missing) > 0 {
			fmt.Fprintf(out, "  not told:   %s\n", strings.Join(l.Missing, ", "))
		}
		for _, n := range l.Notes {
			fmt.Fprintf(out, "  note: %s\n", n)
		}
	}
	return ok, unread, len(looks)
}

func policyName(p *config.Policy) string {
	if len(p.Weights) > 0 {
		return fmt.Sprintf("weighted (%s)", count(len(p.Weights), "scorer"))
	}
	return p.Name
}

func count(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "y"):
		return fmt.Sprintf("%d %sies", n, strings.TrimSuffix(what, "y"))
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// endpointTable prints endpoints for people. Unknown is "?", and so is what a load that is stale or of an endpoint that is
// down said.
func endpointTable(w io.Writer, views []pool.EndpointView) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "ENDPOINT\tDIALECT\tSTATE\tKV USED\tKV TOKENS\tRUNNING\tWAITING\tADAPTERS\tBOOKED\tPENDING\tAGE")
	for i := range views {
		v := &views[i]
		state := cmp.Or(strings.Join(v.State, ","), "up")
		l, age := v.Now(), unknown(v.Load.ScrapeAgeSeconds, "%.1fs")
		if l.Stale {
			age += " (stale)"
		}
		adapters := "?"
		if l.Adapters != nil || l.MaxAdapters != nil {
			adapters = fmt.Sprintf("%d/%s", len(l.Adapters), unknown(l.MaxAdapters, "%d"))
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\n", v.ID, cmp.Or(v.Dialect, "?"), state,
			percent(l.KVCacheUtilization), unknown(l.KVCapacityTokens, "%d"), unknown(l.Running, "%d"), unknown(l.Waiting, "%d"), adapters,
			v.Booked.Requests, v.Booked.PendingTokens, age)
	}
	tw.Flush()
}

func unknown[T any](v *T, format string) string {
	if v == nil {
		return "?"
	}
	return fmt.Sprintf(format, *v)
}

func percent(v *float64) string {
	if v == nil {
		return "?"
	}
	return fmt.Sprintf("%.0f%%", 100**v)
}
