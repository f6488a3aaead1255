package modelsim

import (
	"encoding/json"
	"testing"
)

func TestJSONErrorsNameNoGoType(t *testing.T) {
	f := func(body string, v any, want string) {
		t.Helper()
		if err := JSONError(json.Unmarshal([]byte(body), v)); err == nil || err.Error() != want {
			t.Errorf("%s: %v; want %s", body, err, want)
		}
	}
	f(`{"kind": 3}`, new(Fault), "kind: number where a string belongs")
	f(`{"delay_seconds": "x"}`, new(Fault), "delay_seconds: string where a number belongs")
	f(`"x"`, new([]chatMessage), "string where a list belongs")
	f(`{`, new(Fault), "unexpected end of JSON input")
}
