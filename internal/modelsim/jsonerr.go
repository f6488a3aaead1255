package modelsim

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
)

// JSONError is err of the JSON decoder in words that name no Go type: what was found where, and what was wanted.
func JSONError(err error) error {
	e, ok := errors.AsType[*json.UnmarshalTypeError](err)
	if !ok {
		return err
	}
	field := ""
	if e.Field != "" {
		field = e.Field + ": "
	}
	return fmt.Errorf("%s%s where %s belongs", field, e.Value, jsonNoun(e.Type))
}

// jsonNoun is what JSON calls a value that t can hold.
func jsonNoun(t reflect.Type) string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch k := t.Kind(); {
	case k == reflect.String:
		return "a string"
	case k == reflect.Bool:
		return "true or false"
	case k >= reflect.Int && k <= reflect.Uintptr:
		return "a whole number"
	case k == reflect.Float32 || k == reflect.Float64:
		return "a number"
	case k == reflect.Slice || k == reflect.Array:
		return "a list"
	}
	return "an object"
}
