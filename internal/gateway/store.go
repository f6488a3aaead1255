package gateway

import (
	"fmt"
	"reflect"

	"go.uber.org/zap"

	"kvgate/config"
	"kvgate/internal/quota/redisstore"
)

// A store is where counts are shared, of one configuration.
type store struct {
	*redisstore.Store
	cfg config.Redis
}

// newStore returns the store in use, where r is what it was made of, or else another one.
func (g *Gateway) newStore(r *config.Redis) (*store, error) {
	if g.store != nil && reflect.DeepEqual(g.store.cfg, *r) {
		return g.store, nil
	}
	tlsConfig, err := endpointTLS(r.TLS)
	if err != nil {
		return nil, fmt.Errorf("quotas.redis.tls: %w", err)
	}
	s, err := redisstore.New(redisstore.Options{
		URL: r.URL.Reveal(), Addresses: r.Addresses, Master: r.Master, Username: r.Username, Password: r.Password.Reveal(), TLS: tlsConfig,
		Timeout: r.Timeout, Prefix: r.Prefix,
		OnState: func(up bool, err error) {
			if up {
				g.log.Info("the store of quotas can be asked again")
				return
			}
			g.log.Warn("the store of quotas cannot be asked", zap.String("on_failure", r.OnFailure), zap.Error(err))
		},
	})
	if err != nil {
		return nil, fmt.Errorf("quotas.redis: %w", err)
	}
	return &store{s, *r}, nil
}
