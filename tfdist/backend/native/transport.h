// Point-to-point messages between processes: named tensors over connected sockets.

#ifndef TFDIST_NATIVE_TRANSPORT_H_
#define TFDIST_NATIVE_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfdist {

class Peer;

// Which call a message belongs to. A step that fails leaves messages behind that nobody received:
// the same operation of a later step must not take them.
struct Call {
  std::string tag;
  // The id of the step that TensorFlow runs, of an operation in a graph; 0 of one that runs eagerly.
  int64_t step_id = 0;
};

// The messages of this process. Each has a tag; messages of one tag between two ranks arrive in
// the order in which they were sent, and nothing is said about those of different tags. A message
// is received by the same step of the same run only: an older one is dropped, a newer one is an
// error of the receiver, whose step it can never be.
class Transport {
 public:
  // Bytes of tensors, so far.
  struct Traffic {
    int64_t sent = 0, received = 0;
  };

  using Arrival = std::function<void(absl::Status, tensorflow::Tensor)>;

  // There is one in a process. It is never destroyed: its threads may outlive `main`.
  static Transport& Get();

  // Takes over a connected socket that leads to `rank`.
  void AddPeer(int rank, int socket);

  // Ends all connections.
  void Close();

  // Begins a run: `fit`, `evaluate` or `predict`, whose number all ranks have agreed on. Messages
  // of earlier runs are dropped, and receives that still wait for one fail.
  void BeginRun(int64_t run);

  // Returns at once; the tensor's buffer is held until the kernel has it.
  absl::Status Send(int rank, const Call& call, const tensorflow::Tensor& tensor);

  // Calls `arrival` with the next message of this call, on the thread that read it, or with the
  // reason why none can come. Returns a number by which to `Abandon` it.
  int64_t Receive(int rank, const Call& call, Arrival arrival);

  // Calls the `arrival` of that receive, if it still waits, with a cancellation.
  void Abandon(int rank, const std::string& tag, int64_t number);

  // Waits until the kernel has all that was sent; false after `seconds`.
  bool Flush(double seconds);

  Traffic Count();

 private:
  std::shared_ptr<Peer> Find(int rank);

  std::mutex mutex_;
  std::map<int, std::shared_ptr<Peer>> peers_;
  int64_t run_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_NATIVE_TRANSPORT_H_
