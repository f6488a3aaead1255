package config

import (
	"fmt"
	"reflect"
	"strings"
)

// Reference is every key as Markdown: a table per part of the file, from the same source as [AnnotatedDefault] and [Schema].
// docs/configuration.md is this text below a heading.
func Reference(o Options) []byte {
	r := referencer{schemer: schemer{docs: docsOf(append([]string{source}, sources...)...), o: o, root: Default()}}
	config := reflect.ValueOf(r.root).Elem()
	top := &part{name: "top level", doc: "Keys that stand at the beginning of a line."}
	r.parts = append(r.parts, top)
	for _, f := range fieldsOf(config.Type()) {
		if inner := structOf(f.typ); inner != nil {
			p := &part{name: f.name, doc: f.named(r.docs[f.doc])}
			r.parts = append(r.parts, p)
			prefix := f.name
			if f.typ.Kind() == reflect.Slice {
				prefix += "[]"
			}
			r.keys(p, prefix, inner, defaultsOf(config.FieldByIndex(f.index), inner, r.root), f.restart)
			continue
		}
		r.key(top, f.name, &f, config.FieldByIndex(f.index), f.restart)
	}
	var out strings.Builder
	for _, p := range r.parts {
		fmt.Fprintf(&out, "\n## %s\n\n%s\n\n| key | value | default | reload | |\n|---|---|---|---|---|\n", p.name, escaped(p.doc))
		for _, row := range p.rows {
			fmt.Fprintf(&out, "| %s |\n", strings.Join(row, " | "))
		}
	}
	return []byte(out.String())
}

type referencer struct {
	schemer
	parts []*part
}

// A part of the file is a section of the reference.
type part struct {
	name, doc string
	rows      [][]string
}

// keys adds the keys of a struct whose defaults are in v.
func (r *referencer) keys(p *part, prefix string, t reflect.Type, v reflect.Value, restart bool) {
	for _, f := range fieldsOf(t) {
		name, again := prefix+"."+f.name, restart || f.restart
		inner := structOf(f.typ)
		if inner == nil || inner == t { // a value, or a struct within itself
			r.key(p, name, &f, v.FieldByIndex(f.index), again)
			continue
		}
		r.key(p, name, &f, reflect.Value{}, again)
		switch f.typ.Kind() {
		case reflect.Slice:
			name += "[]"
		case reflect.Map:
			name += ".NAME"
		}
		r.keys(p, name, inner, defaultsOf(v.FieldByIndex(f.index), inner, r.root), again)
	}
}

// key adds one row. v is the default, invalid where the key holds others.
func (r *referencer) key(p *part, name string, f *field, v reflect.Value, restart bool) {
	reload := "yes"
	if restart {
		reload = "restart"
	}
	def := ""
	if v.IsValid() {
		if d := r.printed(v, f); d != nil && fmt.Sprint(d) != "" {
			def = fmt.Sprintf("`%v`", d)
		}
	}
	p.rows = append(p.rows, []string{"`" + name + "`", r.kind(f), def, reload, escaped(f.named(r.docs[f.doc]))})
}

// kind says what a key's value is, in words.
func (r *referencer) kind(f *field) string {
	t, list := f.typ, ""
	for {
		switch {
		case t.Kind() == reflect.Slice:
			t, list = t.Elem(), "list of "
			continue
		case t.Kind() == reflect.Pointer:
			t = t.Elem()
			continue
		}
		break
	}
	var enum []string
	if e, ok := r.text(f)["enum"].([]string); ok && t.Kind() == reflect.String {
		enum = e
	}
	word := "text"
	switch {
	case len(enum) > 0:
		word = "`" + strings.Join(enum, "`, `") + "`"
	case t == durationType:
		word = "duration"
	case t == bytesType:
		word = "size"
	case t == secretType:
		word = "secret"
	case t.Kind() == reflect.Bool:
		word = "true or false"
	case t.Kind() == reflect.Float64:
		word = "number"
	case t.Kind() == reflect.Struct:
		word = "keys below"
	case t.Kind() == reflect.Map && structOf(t) != nil:
		word = "keys below, by name"
	case t.Kind() == reflect.Map && t.Elem().Kind() == reflect.Float64:
		word = "numbers by name"
	case t.Kind() == reflect.Map:
		word = "texts by name"
	case t.Kind() != reflect.String:
		word = "whole number"
	case f.path != "":
		word = "file"
	}
	if f.min != "" || f.max != "" {
		word += ", " + strings.TrimSuffix(f.min+"–"+f.max, "–")
	}
	return list + word
}

// structOf is the struct that a value of type t is made of, itself or in a list or map; nil if there is none to write out.
func structOf(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Map {
		t = t.Elem()
	}
	if t.Kind() == reflect.Struct && len(fieldsOf(t)) > 0 {
		return t
	}
	return nil
}

// defaultsOf are the defaults of a struct of type t that v is, points to, or would hold.
func defaultsOf(v reflect.Value, t reflect.Type, root *Config) reflect.Value {
	if v.Type() == t {
		return v
	}
	d := reflect.New(t)
	setDefaults(d, root)
	return d.Elem()
}

// escaped is text in a cell of a table: one line, without what Markdown would take for more than text.
func escaped(doc string) string {
	return strings.NewReplacer("|", "\\|", "<", "&lt;", "\n", " ").Replace(strings.Join(strings.Fields(doc), " "))
}
