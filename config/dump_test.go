package config

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

const examplePath = "../config.example.yaml"

func TestExampleFile(t *testing.T) {
	want := AnnotatedDefault()
	if *update {
		if err := os.WriteFile(examplePath, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(examplePath)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("config.example.yaml is stale; run: go generate ./config")
	}

	// What it sets outside pools is what is set without it.
	c, err := Load(examplePath, testOptions())
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Warnings()) > 0 {
		t.Error(c.Warnings())
	}
	def := Default()
	for i := range reflect.TypeFor[Config]().NumField() {
		sf := reflect.TypeFor[Config]().Field(i)
		if !sf.IsExported() || sf.Name == "Pools" {
			continue
		}
		if g, w := reflect.ValueOf(c).Elem().Field(i).Interface(), reflect.ValueOf(def).Elem().Field(i).Interface(); !reflect.DeepEqual(g, w) {
			t.Errorf("%s: the example says %+v, the default is %+v", sf.Name, g, w)
		}
	}
	if !reflect.DeepEqual(c.Pools[0].Timeouts, def.Timeouts.EndpointTimeouts) {
		t.Errorf("pool timeouts: the example says %+v", c.Pools[0].Timeouts)
	}
}

// Every key must be in the example, with a comment, and what is commented out must be right too.
func TestExampleNamesEveryKey(t *testing.T) {
	data, err := os.ReadFile(examplePath)
	if err != nil {
		t.Fatal(err)
	}
	commented := regexp.MustCompile(`(?m)^(\s*)#(\S|  )`)
	text := commented.ReplaceAllString(string(data), "$1$2")
	if text == string(data) {
		t.Fatal("nothing is commented out")
	}

	d := newDecoder(examplePath, testOptions())
	d.decode([]byte(text))
	excused := regexp.MustCompile(`cannot be read|there is (api_key|token|url|password) too|REDIS_PASSWORD|there is service too|there is to as well|there is a jwks_url too|the InferencePool holds the ports|custom: has no effect with dialect|A_KEY|KVGATE_ADMIN_TOKEN|OTLP_AUTHORIZATION|ENDPOINT_API_KEY is not set`)
	for _, p := range d.problems.Errors() {
		if !excused.MatchString(p.Error()) {
			t.Errorf("with every key on: %v", p)
		}
	}
	var walk func(rt reflect.Type, paths ...string)
	walk = func(rt reflect.Type, paths ...string) {
		for rt.Kind() == reflect.Pointer || rt.Kind() == reflect.Slice {
			if rt.Kind() == reflect.Slice {
				for i, p := range paths {
					paths[i] = p + "[0]"
				}
				for _, p := range paths[:len(paths):len(paths)] {
					paths = append(paths, strings.TrimSuffix(p, "[0]")+"[1]")
				}
			}
			rt = rt.Elem()
		}
		for _, f := range structFields(rt) {
			found := false
			var at []string
			for _, p := range paths {
				at = append(at, join(p, f.name))
				found = found || d.values[join(p, f.name)] != nil
			}
			if !found && !f.short { // a short key may be said by a plain value
				t.Errorf("%s is not in the example", at[0])
			}
			if docsOf(sources...)[f.doc] == "" {
				t.Errorf("%s: the field %s has no comment", at[0], f.doc)
			}
			walk(f.typ, at...)
		}
	}
	walk(reflect.TypeFor[Config](), "")
}

func TestTagsAreSound(t *testing.T) {
	var walk func(rt reflect.Type)
	walk = func(rt reflect.Type) {
		for rt.Kind() == reflect.Pointer || rt.Kind() == reflect.Slice {
			rt = rt.Elem()
		}
		for _, f := range structFields(rt) {
			if f.name == "" || f.name != snakeCase(f.name) {
				t.Errorf("%s: key %q is not snake_case", f.doc, f.name)
			}
			if (f.min == "") != (f.max == "") {
				t.Errorf("%s: min and max go together", f.doc)
			}
			for _, s := range []string{f.min, f.max} {
				ok := true
				switch {
				case s == "":
				case f.typ == durationType:
					_, fix := parseDuration(s)
					ok = fix == ""
				case f.typ == bytesType:
					_, fix := parseBytes(s)
					ok = fix == ""
				}
				if !ok {
					t.Errorf("%s: %q is no bound", f.doc, s)
				}
			}
			walk(f.typ)
		}
	}
	walk(reflect.TypeFor[Config]())
}

// A dump is a file that means the same.
func TestRedactedLoadsAgain(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.good.yaml")
	for _, f := range append(files, examplePath) {
		c, err := Load(f, testOptions())
		if err != nil {
			t.Fatal(err)
		}
		dump := Redacted(c)
		again, err := Parse("dump.yaml", dump, testOptions())
		if err != nil {
			t.Errorf("%s:\n%v\n%s", f, err, dump)
			continue
		}
		if bytes.Contains(dump, []byte("from-env")) || bytes.Contains(dump, []byte("file-key")) {
			t.Errorf("%s: a secret in the dump:\n%s", f, dump)
		}
		equalConfigs(t, f, c, again)
	}
}

// equalConfigs compares what two configurations say, secrets aside.
func equalConfigs(t *testing.T, name string, a, b *Config) {
	t.Helper()
	strip := func(c *Config) Config {
		out := *c
		out.file, out.hash, out.inputs, out.warnings = "", "", "", nil
		out.Pools = append([]Pool{}, c.Pools...)
		for i := range out.Pools {
			out.Pools[i].APIKey = Secret{}
		}
		if r := out.Quotas.Redis; r != nil {
			other := *r
			other.URL = Secret{}
			out.Quotas.Redis = &other
		}
		return out
	}
	if x, y := strip(a), strip(b); !reflect.DeepEqual(x, y) {
		t.Errorf("%s: the dump means something else:\n%+v\n%+v", name, x, y)
	}
}
