package workers

import (
	"context"
	"math"
	"strings"
	"time"

	fnpb "github.com/apache/beam/sdks/v2/go/pkg/beam/model/fnexecution_v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// Workers name their metrics by short ids, which each process counts from 1, and Prism has one table of them for a job.
// The ids therefore start with the number of the process on their way to the runner.

// dialer returns a replacement of grpcx.Dial for the process with a prefix.
func dialer(prefix string) func(context.Context, string, time.Duration) (*grpc.ClientConn, error) {
	return func(_ context.Context, endpoint string, _ time.Duration) (*grpc.ClientConn, error) {
		return grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.WaitForReady(true)),
			grpc.WithStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
				s, err := streamer(ctx, desc, cc, method, opts...)
				return stream{s, prefix}, err
			}))
	}
}

// stream adds the prefix to the short ids that a worker sends, and removes it from those that the runner asks for.
type stream struct {
	grpc.ClientStream
	prefix string
}

func (s stream) SendMsg(m any) error {
	if r, ok := m.(*fnpb.InstructionResponse); ok {
		if b := r.GetProcessBundle(); b != nil {
			b.MonitoringData = prefixed(b.MonitoringData, s.prefix)
		}
		if b := r.GetProcessBundleProgress(); b != nil {
			b.MonitoringData = prefixed(b.MonitoringData, s.prefix)
		}
		if i := r.GetMonitoringInfos(); i != nil {
			i.MonitoringInfo = prefixed(i.MonitoringInfo, s.prefix)
		}
	}
	return s.ClientStream.SendMsg(m)
}

func (s stream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if r, ok := m.(*fnpb.InstructionRequest); ok && err == nil {
		ids := r.GetMonitoringInfos().GetMonitoringInfoId()
		for i, id := range ids {
			ids[i] = strings.TrimPrefix(id, s.prefix)
		}
	}
	return err
}

func prefixed[V any](m map[string]V, prefix string) map[string]V {
	out := make(map[string]V, len(m))
	for id, v := range m {
		out[prefix+id] = v
	}
	return out
}
