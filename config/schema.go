package config

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Patterns of text that stands for a number with a unit.
const (
	durationPattern = `^([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))*$|^0$`
	bytesPattern    = `^([0-9]+(\.[0-9]*)?|\.[0-9]+)(B|KiB|MiB|GiB|TiB|kB|KB|MB|GB|TB)$`
)

// Schema is the file format as JSON Schema (draft 2020-12), for editors: every key with its documentation, default and
// range, from the same source as everything else that is said about it. Load checks more than a schema can say.
func Schema(o Options) []byte {
	s := schemer{docs: docsOf(append([]string{source}, sources...)...), o: o, root: Default()}
	root := s.object(reflect.TypeFor[Config](), reflect.ValueOf(s.root).Elem())
	root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	root["title"] = "kvgate configuration"
	root["required"] = []string{"pools"}
	b, err := json.MarshalIndent(root, "", "  ")
	if err != nil {
		panic("BUG: " + err.Error())
	}
	return append(b, '\n')
}

type schemer struct {
	docs map[string]string
	o    Options
	root *Config
}

// object is the schema of a struct; v holds its defaults.
func (s *schemer) object(t reflect.Type, v reflect.Value) map[string]any {
	properties := make(map[string]any)
	out := map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
	short := ""
	for _, f := range fieldsOf(t) {
		fv := v.FieldByIndex(f.index)
		p := s.value(f.typ, fv, &f)
		if doc := strings.Join(strings.Fields(s.docs[f.doc]), " "); doc != "" {
			p["description"] = doc
		}
		if d := s.printed(fv, &f); d != nil {
			p["default"] = d
		}
		properties[f.name] = p
		if f.short {
			short = f.name
		}
	}
	if short == "" {
		return out
	}
	return map[string]any{"anyOf": []any{properties[short], out}} // a plain value stands for that key
}

// printed is the default as JSON; nil: there is none to tell.
func (s *schemer) printed(v reflect.Value, f *field) any {
	if f.optional || f.typ == secretType {
		return nil
	}
	switch v.Interface().(type) {
	case time.Duration:
		text, _ := (&printer{root: s.root}).inline(v)
		return strings.Trim(text, `"`)
	case Bytes:
		return v.Interface().(Bytes).String()
	}
	switch v.Kind() {
	case reflect.Bool, reflect.Int, reflect.Int64, reflect.Int32, reflect.Float64:
		return v.Interface()
	case reflect.String:
		if v.Len() > 0 {
			return v.String()
		}
	}
	return nil
}

// value is the schema of a value of type t; v is its default.
func (s *schemer) value(t reflect.Type, v reflect.Value, f *field) map[string]any {
	switch {
	case t == durationType:
		return map[string]any{"type": "string", "pattern": durationPattern, "examples": []string{"5s", "2m"}}
	case t == bytesType:
		return map[string]any{"type": "string", "pattern": bytesPattern, "examples": []string{"32MiB"}}
	case t == secretType:
		return map[string]any{"type": "string"}
	}
	switch t.Kind() {
	case reflect.Pointer:
		d := reflect.New(t.Elem())
		setDefaults(d, s.root)
		return s.value(t.Elem(), d.Elem(), f)
	case reflect.Struct:
		d := reflect.New(t)
		setDefaults(d, s.root)
		if v.IsValid() && !v.IsZero() {
			d.Elem().Set(v)
		}
		return s.object(t, d.Elem())
	case reflect.Slice:
		e := reflect.New(t.Elem())
		setDefaults(e, s.root)
		return map[string]any{"type": "array", "items": s.value(t.Elem(), e.Elem(), f)}
	case reflect.Map:
		e := reflect.New(t.Elem())
		return map[string]any{"type": "object", "additionalProperties": s.value(t.Elem(), e.Elem(), &field{})}
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.Float64:
		return bounded(map[string]any{"type": "number"}, f)
	case reflect.String:
		return s.text(f)
	default:
		return bounded(map[string]any{"type": "integer"}, f)
	}
}

func bounded(m map[string]any, f *field) map[string]any {
	for key, text := range map[string]string{"minimum": f.min, "maximum": f.max} {
		if n, err := strconv.ParseFloat(text, 64); err == nil {
			m[key] = n
		}
	}
	return m
}

func (s *schemer) text(f *field) map[string]any {
	if len(f.enum) > 0 {
		return map[string]any{"enum": f.enum}
	}
	switch f.known {
	case "dialect":
		return map[string]any{"enum": either(s.o.Dialects, "auto", "custom")}
	case "policy":
		return map[string]any{"enum": either(s.o.Policies, "auto")}
	}
	if f.number {
		return map[string]any{"type": []string{"string", "integer"}}
	}
	return map[string]any{"type": "string"}
}

// either are the registered names and those that are always there, sorted.
func either(registered []string, always ...string) []string {
	set := make(map[string]bool)
	for _, n := range append(always, registered...) {
		set[n] = true
	}
	return slices.Sorted(maps.Keys(set))
}
