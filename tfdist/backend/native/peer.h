// The connection to one other process, and the messages on it.

#ifndef TFDIST_NATIVE_PEER_H_
#define TFDIST_NATIVE_PEER_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/tensor.h"
#include "transport.h"

namespace tfdist {

// Says that a connection has ended.
absl::Status Gone(int rank, const std::string& why);

// One connected process, with a thread that reads from it and one that writes what did not fit
// into the socket at once.
class Peer : public std::enable_shared_from_this<Peer> {
 public:
  // Takes over a connected socket.
  Peer(int rank, int socket);
  ~Peer();

  // Begins to read and to write.
  void Start();

  // As those of `Transport`.
  void BeginRun(int64_t run);
  absl::Status Send(const Call& call, const tensorflow::Tensor& tensor);
  int64_t Receive(const Call& call, Transport::Arrival arrival);
  void Abandon(const std::string& tag, int64_t number);

  // Ends the connection and both threads; what waits is told so.
  void Close();

  // Waits until the kernel has all that was sent.
  bool Flush(std::chrono::steady_clock::time_point until);

  int64_t sent() const { return sent_; }
  int64_t received() const { return received_; }

 private:
  struct Header;
  struct Message;
  // When a message was sent, as both ranks count: the run, and the how-manieth step of it in which
  // they exchange messages with each other; step 0 of what runs eagerly.
  struct Moment {
    int64_t run = 0, step = 0;
  };
  struct Arrived {
    Moment sent;
    tensorflow::Tensor tensor;
  };
  struct Waiting {
    int64_t number;
    Moment moment;
    Transport::Arrival arrival;
  };
  struct Mailbox {
    std::deque<Arrived> arrived;
    std::deque<Waiting> waiting;
  };

  // The moment of an operation that runs now.
  Moment Now(int64_t step_id);
  // Whether `sent` is of an earlier moment than `wanted`: a message that nobody will receive.
  static bool IsStale(const Moment& sent, const Moment& wanted);
  // Ok where a message of that moment is the one that a receive of another waits for.
  absl::Status Matches(const Moment& sent, const Moment& wanted) const;

  // Of the writing side; `write_mutex_` is held.
  absl::Status Post(Message message);
  absl::Status WriteSome(Message* message, int flags);
  void WriteAll();

  // Of the reading thread.
  void ReadAll();
  absl::Status ReadOne();
  absl::Status Read(void* target, size_t bytes);
  void Deliver(const std::string& tag, const Moment& sent, tensorflow::Tensor tensor);

  const int rank_;
  const int socket_;
  std::atomic<int64_t> sent_{0}, received_{0};

  // The steps of this run in which a message was sent or asked for, the newest last.
  std::mutex step_mutex_;
  int64_t run_ = 0, num_steps_ = 0;
  std::deque<std::pair<int64_t, int64_t>> steps_;  // TensorFlow's id, and the number.

  std::mutex write_mutex_;
  std::condition_variable write_ready_, write_done_;
  std::deque<Message> outbox_;
  bool closed_ = false;
  absl::Status write_status_;

  std::mutex read_mutex_;
  std::unordered_map<std::string, Mailbox> mailboxes_;
  int64_t last_number_ = 0;
  absl::Status read_status_;

  // Of the reading thread alone.
  std::vector<char> buffer_;
  size_t begin_ = 0, end_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_NATIVE_PEER_H_
