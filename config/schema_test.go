package config

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"gopkg.in/yaml.v3"
)

func schema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema(testOptions())))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("kvgate.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("kvgate.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func yamlValue(t *testing.T, data []byte) any {
	t.Helper()
	var v any
	if err := yaml.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// What Load takes, the schema takes: every good file, and the example.
func TestSchemaTakesGoodFiles(t *testing.T) {
	s := schema(t)
	files, err := filepath.Glob("testdata/*.good.yaml")
	if err != nil || len(files) < 4 {
		t.Fatalf("%d good files, %v", len(files), err)
	}
	for _, name := range append(files, examplePath) {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Validate(yamlValue(t, data)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What an editor should underline, it does.
func TestSchemaRefuses(t *testing.T) {
	s := schema(t)
	f := func(text string, ok bool) {
		t.Helper()
		if !strings.Contains(text, "pools:") {
			text += "\npools: [{name: a, discovery: {static: [\"http://a:1\"]}}]\n"
		}
		if err := s.Validate(yamlValue(t, []byte(text))); (err == nil) != ok {
			t.Errorf("%s: %v; want ok=%v", text, err, ok)
		}
	}
	f("listen: 8080", true)
	f("listen: [1]", false)
	f("lsiten: x", false)
	f("log: {level: loud}", false)
	f("log: {level: debug}", true)
	f("log: {levle: debug}", false)
	f("timeouts: {connect: 5}", false)
	f("timeouts: {connect: 1h30m}", true)
	f("timeouts: {connect: 5 seconds}", false)
	f("limits: {body_bytes: 32MiB}", true)
	f("limits: {body_bytes: 32}", false)
	f("retry: {budget_ratio: 2}", false)
	f("retry: {max_attempts: 1.5}", false)
	f("pools: [{name: a, policy: round_robin, discovery: {static: [{url: \"http://a:1\", weight: 2}]}}]", true)
	f("pools: [{name: a, policy: round_rob, discovery: {static: [\"http://a:1\"]}}]", false)
	f("pools: [{name: a, policy: {weights: {queue: 2, kvCache: 1}}}]", true)
	f("pools: {a: b}", false)
}

// Every key is in it, with its documentation.
func TestSchemaNamesEveryKey(t *testing.T) {
	text := string(Schema(testOptions()))
	var walk func(rt reflect.Type, seen map[reflect.Type]bool)
	walk = func(rt reflect.Type, seen map[reflect.Type]bool) {
		for rt.Kind() == reflect.Pointer || rt.Kind() == reflect.Slice {
			rt = rt.Elem()
		}
		if seen[rt] {
			return
		}
		seen[rt] = true
		for _, f := range structFields(rt) {
			if !strings.Contains(text, `"`+f.name+`": {`) {
				t.Errorf("%s is not in the schema", f.name)
			}
			walk(f.typ, seen)
		}
	}
	walk(reflect.TypeFor[Config](), map[reflect.Type]bool{})
	if n := strings.Count(text, `"description":`); n < 150 {
		t.Errorf("%d descriptions", n)
	}
}
