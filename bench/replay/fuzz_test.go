package replay

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Whatever is in a file, reading it ends, with something that can be replayed or an error.
func FuzzRead(f *testing.F) {
	for _, seed := range []string{
		"",
		head + `{"fleet":{"pool":"p","policy":"auto","endpoints":2}}` + "\n" + `{"at":1767600000,"pool":"p","model":"m","in":300,"out":5,"bytes":1200,"blocks":"AAECAwQFAAECAwQG","status":200,"outcome":"ok"}` + "\n" +
			`{"at":1767600001,"pool":"p","model":"m","adapter":true,"in":300,"out":5,"bytes":1,"blocks":"AAECAwQF","status":200,"outcome":"ok"}` + "\n",
		`{"time":"2026-01-05T08:00:00Z","request_id":"r","served_model":"m","pool":"p","status":200,"input_tokens":1,"output_tokens":1,"duration_seconds":2}` + "\n" + `{"time":"2026-01-05T08:00:09Z","pool":"p"}` + "\n",
		"t_ms,in,out,blocks\n0,1000,5,0-1 7\n5,2000,5,0-18446744073709551615\n",
		`{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2]}` + "\n" + `{"timestamp":9,"input_length":600,"output_length":5,"hash_ids":[1,2]}` + "\n",
	} {
		f.Add([]byte(seed))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		name := filepath.Join(dir, "f") // a worker of the fuzzer is a process with a directory of its own, and runs one at a time
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := Read([]string{name}, ReadOptions{Requests: 1000, Busiest: time.Hour})
		if err != nil {
			return
		}
		q := r.Workload.Requests
		if len(q) < 2 || len(q) > 1000 || q[0].At != 0 || q[len(q)-1].At <= 0 || r.Measured != nil && len(r.Measured) != len(q) {
			t.Fatalf("%+v", r)
		}
		for i := range q {
			if q[i].In < 1 || q[i].Out < 1 || len(q[i].Blocks)*r.Workload.BlockTokens > q[i].In || i > 0 && q[i].At < q[i-1].At {
				t.Fatalf("request %d: %+v", i, q[i])
			}
		}
	})
}
