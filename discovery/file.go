package discovery

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"kvgate/config"
)

func init() {
	register("file", "Endpoints listed in a watched file, YAML or JSON, in the form of Prometheus' file_sd.",
		func(d *config.Discovery) (config.FileSource, bool) {
			if d.File == nil {
				return config.FileSource{}, false
			}
			return *d.File, true
		},
		func(s config.FileSource, env Env) Source { return &file{s, env} })
}

// file looks at its file now and then, instead of having the kernel tell of changes: a read costs microseconds, and it
// works the same for editors that rename, for the symbolic links of a Kubernetes ConfigMap, and on network volumes.
type file struct {
	config.FileSource
	env Env
}

func (f *file) Name() string { return "file" }

// maxTargetFileBytes bounds the file; 10,000 endpoints with labels take about 2 MiB.
const maxTargetFileBytes = 16 << 20

func (f *file) Run(ctx context.Context, emit func([]Target, error)) error {
	var last []byte // what the last emission was about; nil after a failure to read
	for {
		data, err := f.settled(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			last = nil
			emit(nil, err)
		case last == nil || !bytes.Equal(data, last):
			last = data
			emit(parseTargets(f.Path, data, f.env))
		}
		if !sleep(ctx, jitter(f.Interval)) {
			return nil
		}
	}
}

// settled reads the file until two reads agree, so that a writer caught in the middle is not taken at half a word: half
// a list is a list too.
func (f *file) settled(ctx context.Context) ([]byte, error) {
	data, err := readTargetFile(f.Path)
	for range 20 {
		if err != nil || !sleep(ctx, 50*time.Millisecond) {
			return nil, err
		}
		again, err2 := readTargetFile(f.Path)
		if err2 == nil && bytes.Equal(data, again) {
			return data, nil
		}
		data, err = again, err2
	}
	return nil, fmt.Errorf("%s: it keeps changing while it is read", f.Path)
}

func readTargetFile(path string) ([]byte, error) {
	switch st, err := os.Stat(path); {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, fmt.Errorf("%s: it is not a regular file", path)
	case st.Size() > maxTargetFileBytes:
		return nil, fmt.Errorf("%s: it is larger than %s", path, config.Bytes(maxTargetFileBytes))
	}
	h, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	return io.ReadAll(io.LimitReader(h, maxTargetFileBytes))
}

// ReadFile returns the targets that the file at path lists, as source file would find them.
func ReadFile(path string, env Env) ([]Target, error) {
	data, err := readTargetFile(path)
	if err != nil {
		return nil, err
	}
	return parseTargets(path, data, env)
}

// A group is an entry of the file. Labels hold for all of its targets.
type group struct {
	Targets []string          `yaml:"targets" json:"targets"`
	Labels  map[string]string `yaml:"labels" json:"labels"`
}

// Labels with a meaning. The first two are Prometheus' own. Others that begin with two underscores are ignored, as
// Prometheus drops them; the rest become the target's labels.
const (
	labelScheme      = "__scheme__"       // http or https, for targets without one
	labelMetricsPath = "__metrics_path__" // where the metrics page is on the target
	labelMetricsURL  = "__metrics_url__"  // where it is, if elsewhere
	labelDialect     = "__dialect__"
	labelWeight      = "__weight__"
	labelID          = "__id__" // the source's own id; for a group of one target
)

// parseTargets reads the content of a file. Whatever is wrong with one target is wrong with all: part of a set is never
// taken for a set.
func parseTargets(path string, data []byte, env Env) ([]Target, error) {
	groups, err := parseGroups(path, data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var out []Target
	seen := make(map[string]bool)
	for i, g := range groups {
		if len(g.Targets) > 1 && g.Labels[labelID] != "" {
			return nil, fmt.Errorf("%s: group %d: %s on %d targets; an id belongs to one", path, i+1, labelID, len(g.Targets))
		}
		for _, s := range g.Targets {
			t, err := g.target(s, env)
			if err != nil {
				return nil, fmt.Errorf("%s: group %d: %w", path, i+1, err)
			}
			if seen[t.URL] {
				return nil, fmt.Errorf("%s: group %d: %q is listed twice", path, i+1, t.URL)
			}
			seen[t.URL] = true
			out = append(out, t)
		}
	}
	return out, nil
}

func parseGroups(path string, data []byte) (groups []group, err error) {
	if len(bytes.TrimSpace(data)) == 0 {
		return nil, errors.New("it is empty; want a list, [] for no endpoints")
	}
	if filepath.Ext(path) == ".json" {
		dec := json.NewDecoder(bytes.NewReader(data))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&groups); err != nil {
			return nil, err
		}
		if _, err := dec.Token(); err != io.EOF {
			return nil, errors.New("there is more after the list")
		}
	} else {
		defer func() { // the library's own guard does not cover all of its panics
			if r := recover(); r != nil {
				groups, err = nil, fmt.Errorf("not valid YAML: %v", r)
			}
		}()
		dec := yaml.NewDecoder(bytes.NewReader(data))
		dec.KnownFields(true)
		if err := dec.Decode(&groups); err != nil {
			return nil, errors.New(strings.ReplaceAll(strings.ReplaceAll(err.Error(), "\n ", ""), "discovery.group", "a group"))
		}
		if err := dec.Decode(new(yaml.Node)); err != io.EOF {
			return nil, errors.New("there is a second document")
		}
	}
	if groups == nil {
		return nil, errors.New("it holds null; want a list, [] for no endpoints")
	}
	return groups, nil
}

// target makes a target of an entry: a URL, or host:port as Prometheus has it.
func (g *group) target(s string, env Env) (Target, error) {
	full := s
	if !strings.Contains(s, "://") {
		scheme := g.Labels[labelScheme]
		if scheme == "" {
			scheme = "http"
		}
		full = scheme + "://" + s
	}
	url, message, hint := config.CheckURL(full)
	if message != "" {
		return Target{}, fmt.Errorf("target %s; %s", message, hint)
	}
	t := Target{URL: url, Weight: 1}
	for name, v := range g.Labels {
		switch {
		case name == labelMetricsPath:
			if !strings.HasPrefix(v, "/") {
				return Target{}, fmt.Errorf("%s %q does not begin with a slash", name, v)
			}
			if t.MetricsURL == "" {
				t.MetricsURL = url + v
			}
		case name == labelMetricsURL:
			if !strings.HasPrefix(v, "http://") && !strings.HasPrefix(v, "https://") {
				return Target{}, fmt.Errorf("%s %q is not a URL", name, v)
			}
			t.MetricsURL = v
		case name == labelDialect:
			if env.Dialects != nil && !slices.Contains(env.Dialects, v) {
				return Target{}, fmt.Errorf("%s %q is not a dialect; known: %s", name, v, strings.Join(env.Dialects, ", "))
			}
			t.Dialect = v
		case name == labelWeight:
			w, err := strconv.ParseFloat(v, 64)
			if err != nil || !(w > 0 && w <= 1000) {
				return Target{}, fmt.Errorf("%s %q is not a number above 0, up to 1000", name, v)
			}
			t.Weight = w
		case name == labelID:
			t.SourceID = v
		case strings.HasPrefix(name, "__"):
		default:
			if t.Labels == nil {
				t.Labels = make(map[string]string)
			}
			t.Labels[name] = v
		}
	}
	return t, nil
}
