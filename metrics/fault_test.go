package metrics

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvgate/pool"
)

// faultyPages are servers whose page is at fault, each in a way that operators have met. The handlers end when the
// request does.
var faultyPages = []struct {
	name    string
	handler http.HandlerFunc
	fault   Fault
	state   State
	says    string // in the error
}{
	{"hung", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, FaultTimeout, StateUnmeasured, "no whole answer within"},
	{"slow", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "100000")
		for i := 0; r.Context().Err() == nil; i++ {
			fmt.Fprintf(w, "%c", vllmPage[i%len(vllmPage)])
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
			case <-time.After(5 * time.Millisecond):
			}
		}
	}, FaultTimeout, StateUnmeasured, "no whole answer within"},
	{"500", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, vllmPage, 500) }, FaultStatus, StateUnmeasured, "status 500; want 200"},
	{"404", http.NotFound, FaultNotFound, StateUnmeasured, "status 404; want 200"},
	{"401", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(401) }, FaultUnauthorized, StateUnmeasured, "api_key"},
	{"endless", func(w http.ResponseWriter, r *http.Request) {
		b := []byte(strings.Repeat("vllm:num_requests_running_"+strings.Repeat("x", 100)+" 1\n", 500))
		for r.Context().Err() == nil {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	}, FaultTooLarge, StateUnmeasured, "more than 1048576 bytes; raise scrape.max_bytes"},
	{"one endless line", func(w http.ResponseWriter, r *http.Request) {
		b := bytes.Repeat([]byte("x"), 64<<10)
		for r.Context().Err() == nil {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	}, FaultTooLarge, StateUnmeasured, "more than 1048576 bytes"},
	{"garbage", func(w http.ResponseWriter, _ *http.Request) {
		for i := range 5000 {
			w.Write([]byte{byte(i * 7), byte(i * 13), 0, '\n', byte(i)})
		}
	}, FaultUnrecognized, StateUnmeasured, "none of which a dialect knows"},
	{"gzip bomb", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		z, _ := gzip.NewWriterLevel(w, gzip.BestCompression)
		b := bytes.Repeat([]byte("x 1\n"), 16<<10)
		for range 16 << 10 { // 1 GiB, 1 MiB on the wire
			if _, err := z.Write(b); err != nil || r.Context().Err() != nil {
				return
			}
		}
	}, FaultTooLarge, StateUnmeasured, "more than 1048576 bytes"},
	{"gzip of nothing", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		b := []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255}
		b = append(b, bytes.Repeat([]byte{0, 0, 0, 255, 255}, 10000)...) // stored blocks of no bytes
		for i := 0; r.Context().Err() == nil; i++ {
			if _, err := w.Write(b[min(i, 1)*10:]); err != nil {
				return
			}
		}
	}, FaultTooLarge, StateUnmeasured, "more than 1048576 bytes"},
	{"broken gzip", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		fmt.Fprint(w, vllmPage)
	}, FaultEncoding, StateUnmeasured, "broken gzip"},
	{"redirect", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
	}, FaultRedirect, StateUnmeasured, `redirect to "/elsewhere", which is not followed; set metrics_url`},
	{"HTML", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "<html><body>vllm:num_requests_running 1\n")
	}, FaultHTML, StateUnmeasured, "HTML; want"},
	{"JSON", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"detail":"x"}`) }, FaultJSON, StateUnmeasured, "JSON; want"},
	{"empty", func(http.ResponseWriter, *http.Request) {}, FaultEmpty, StateUnmeasured, "an empty page"},
	{"cut", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100000")
		fmt.Fprint(w, vllmPage)
		panic(http.ErrAbortHandler)
	}, FaultReset, StateUnmeasured, "the connection ended before the answer"},
	{"huge header", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Huge", strings.Repeat("x", 1<<20))
		fmt.Fprint(w, vllmPage)
	}, FaultReset, StateUnmeasured, "the connection ended before the answer"},
}

// A page at fault leaves its endpoint in the table, not scraped, its requests unaffected; the error says what to do, and
// when the page is right it is read.
func TestFaultyPages(t *testing.T) {
	for _, f := range faultyPages {
		t.Run(f.name, func(t *testing.T) {
			var broken atomic.Bool
			broken.Store(true)
			var redirected atomic.Bool
			s := newModelServer(t)
			s.serve("/v1/models", modelList)
			s.handle("/elsewhere", func(w http.ResponseWriter, _ *http.Request) {
				redirected.Store(true)
				fmt.Fprint(w, vllmPage)
			})
			s.handle("/metrics", func(w http.ResponseWriter, r *http.Request) {
				if broken.Load() {
					f.handler(w, r)
				} else {
					fmt.Fprint(w, vllmPage)
				}
			})
			s.Config.ErrorLog = nil
			o := quick()
			o.MaxPageBytes = 1 << 20
			if f.fault == FaultTimeout {
				o.Timeout = 50 * time.Millisecond
			}
			faults := make(chan Fault, 1000)
			o.OnScrape = func(_ *pool.Endpoint, s Scrape) { faults <- s.Fault }
			r := newRig(t, o, pool.Spec{URL: s.URL, Dialect: "vllm"})
			if got := <-faults; got != f.fault {
				t.Errorf("fault %q; want %q", got, f.fault)
			}
			// Its models are known, so it gets requests.
			row := r.row(0, "asked for its models", func(row *pool.Row) bool { return row.Served != nil })
			if row.ScrapedAt != 0 || row.Load.Known != 0 {
				t.Errorf("it looks scraped: %+v", row.Load)
			}
			if got, want := <-r.states, "unknown>"+string(f.state); got != want {
				t.Errorf("state %s; want %s", got, want)
			}
			n, err := r.table.LastError(r.endpoints[0])
			if n == 0 || err == nil || !strings.Contains(err.Error(), f.says) {
				t.Errorf("%d failures, the last %v; want %q in it", n, err, f.says)
			}
			broken.Store(false)
			if o.Timeout < time.Second { // a busy machine may be slow too
				o.Timeout = 10 * time.Second
				if err := r.manager.Configure(o); err != nil {
					t.Fatal(err)
				}
			}
			if row := r.row(0, "scraped", func(row *pool.Row) bool { return row.ScrapedAt != 0 }); row.Load.Running != 4 {
				t.Errorf("recovered load %+v", row.Load)
			}
			if redirected.Load() {
				t.Error("a redirect was followed")
			}
		})
	}
}

func TestRefusedAndWrongScheme(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	_, err = scrapeOnce(t, "http://"+address, Auto, Options{})
	if faultOf(err) != FaultRefused || !strings.Contains(err.Error(), "nothing listens there") {
		t.Errorf("refused: %v", err)
	}
	s := newModelServer(t)
	_, err = scrapeOnce(t, strings.Replace(s.URL, "http:", "https:", 1), Auto, Options{})
	if faultOf(err) != FaultTLS || !strings.Contains(err.Error(), "write http://") {
		t.Errorf("https to http: %v", err)
	}
	tls := httptest.NewTLSServer(http.NotFoundHandler())
	defer tls.Close()
	tls.Config.ErrorLog = nil
	_, err = scrapeOnce(t, tls.URL, Auto, Options{})
	if faultOf(err) != FaultTLS || !strings.Contains(err.Error(), "tls settings") {
		t.Errorf("unknown authority: %v", err)
	}
}

// What is not read of a page that is too large isn't kept in memory either.
func TestHugePageIsNotHeld(t *testing.T) {
	d := Lookup("vllm")
	p := newPage(d.want, d)
	endless := readerFunc(func(b []byte) (int, error) {
		for i := range b {
			b[i] = 'x'
		}
		return len(b), nil
	})
	if err := p.read(endless, 4<<20, true); err == nil {
		t.Error("no error")
	}
	if bp := chunks.Get().(*[]byte); cap(*bp) > keepChunkSize {
		t.Errorf("a buffer of %d bytes was kept", cap(*bp))
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

var _ io.Reader = readerFunc(nil)
