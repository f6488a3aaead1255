package config

import (
	_ "embed"
	"fmt"
	"time"
)

//go:embed adapters.go
var adaptersSource string

func init() { sources = append(sources, adaptersSource) }

// Adapters manages the LoRA adapters of a pool as memory: it loads what is asked for and no endpoint has, through the servers'
// own API, gives hot ones replicas, keeps pinned ones, restores a restarted server's set, and unloads what is worth least
// when slots are short. vLLM needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, SGLang --enable-lora.
type Adapters struct {
	// Registry lists the adapters. Those that servers have besides are used, and left alone.
	Registry []Adapter `yaml:"registry" example:"[{name: sql, source: /adapters/sql, base: meta-llama/Llama-3.3-70B-Instruct, pin: true, min_replicas: 2, max_replicas: 4}]"`
	// PerEndpoint is how many adapters may be loaded on one endpoint. 0: as many as one batch can hold (vLLM's --max-loras).
	// With --max-cpu-loras set it to that.
	PerEndpoint int `yaml:"per_endpoint" min:"0" max:"10000"`
	// Wait is how long a request waits for its adapter to be loaded; then 503.
	Wait time.Duration `yaml:"wait" min:"10ms" max:"1h"`
	// LoadTimeout is how long a server may take to load or unload one adapter.
	LoadTimeout time.Duration `yaml:"load_timeout" min:"100ms" max:"1h"`
	// Loading is how many adapters may be loaded at a time, in the pool, that no request waits for. Danger: a load stalls what
	// runs on its server for up to half a second.
	Loading int `yaml:"loading" min:"1" max:"1000"`
	// Hold is how long an adapter stays where it was loaded before it may make room for one that nobody waits for, and how
	// long an endpoint on which loading failed is not asked again.
	Hold time.Duration `yaml:"hold" min:"100ms" max:"24h"`
	// Preload fills free slots with adapters that nobody has asked for yet, in the order of the registry.
	Preload bool `yaml:"preload"`
	// DryRun logs what would be done, and does nothing: requests for adapters that no endpoint has are refused.
	DryRun bool `yaml:"dry_run"`
}

// Adapter is an entry of the registry.
type Adapter struct {
	// Name is what clients ask for in model.
	Name string `yaml:"name" example:"sql"`
	// Source is where the server loads it from: a path on the server, or an id of a hub if the server may use it.
	Source string `yaml:"source" example:"/adapters/sql"`
	// Base is the base model that it sits on, where clients should be told another one than the pool's.
	Base string `yaml:"base" example:"meta-llama/Llama-3.3-70B-Instruct"`
	// Pin keeps it loaded whether it is asked for or not.
	Pin bool `yaml:"pin"`
	// MinReplicas is on how many endpoints it is kept, at least.
	MinReplicas int `yaml:"min_replicas" min:"0" max:"1000"`
	// MaxReplicas is on how many endpoints it may be. 0: on all.
	MaxReplicas int `yaml:"max_replicas" min:"0" max:"1000"`
}

func (a *Adapters) setDefaults(*Config) {
	*a = Adapters{Wait: 30 * time.Second, LoadTimeout: time.Minute, Loading: 1, Hold: 30 * time.Second, Preload: true}
}

// adapters checks a pool's adapters. models are all names of base models, and of the adapters before, with where they are.
func (d *decoder) adapters(at string, p *Pool, models map[string]string) {
	a := p.Adapters
	if a == nil {
		return
	}
	if len(a.Registry) == 0 {
		d.warn(at, "has no effect without a registry", "list adapters, each with name and source, under registry")
	}
	least := 0
	for i := range a.Registry {
		e := &a.Registry[i]
		path := fmt.Sprintf("%s.registry[%d]", at, i)
		if d.bad[path] {
			continue
		}
		if e.Name == "" {
			d.wrong(path+".name", "an adapter needs a name", "write name: …")
		} else if other, ok := models[e.Name]; ok {
			d.wrong(path+".name", fmt.Sprintf("%q is at %s already", e.Name, other), "give each adapter a name that no model and no other adapter has")
		} else {
			models[e.Name] = path + ".name"
		}
		if e.Source == "" {
			d.wrong(path+".source", "an adapter needs a source", "write source: with the path, on the servers, that it is loaded from")
		}
		if e.MaxReplicas > 0 && e.MinReplicas > e.MaxReplicas {
			d.wrong(path+".min_replicas", fmt.Sprintf("min_replicas (%d) is more than max_replicas (%d)", e.MinReplicas, e.MaxReplicas), "lower it, or raise max_replicas")
		}
		if e.Pin || e.MinReplicas > 0 {
			least++
		}
	}
	if n := len(p.Discovery.Static); a.PerEndpoint > 0 && n > 0 && least > n*a.PerEndpoint {
		d.warn(at+".per_endpoint", fmt.Sprintf("%d adapters are to stay loaded, and %d endpoints with %d each have room for %d", least, n, a.PerEndpoint, n*a.PerEndpoint),
			"raise it, or pin fewer")
	}
}
