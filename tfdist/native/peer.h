// The connection to one other process, and the messages on it.

#ifndef TFDIST_NATIVE_PEER_H_
#define TFDIST_NATIVE_PEER_H_

#include <sys/types.h>

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
// into the socket at once. Where the other process can read the memory of this one, the content of
// large messages does not go through the socket: the tensor is lent, and held until the other has
// said that it has its copy.
class Peer : public std::enable_shared_from_this<Peer> {
 public:
  // Takes over a connected socket.
  Peer(int rank, int socket);
  ~Peer();

  // Begins to read and to write.
  void Start();

  // As those of `Transport`.
  absl::Status Send(const std::string& tag, const tensorflow::Tensor& tensor);
  int64_t Receive(const std::string& tag, Transport::Arrival arrival);
  void Abandon(const std::string& tag, int64_t number);

  // Ends the connection and both threads; what waits is told so.
  void Close();

  // Waits until the other process has, or the kernel has for it, all that was sent.
  bool Flush(std::chrono::steady_clock::time_point until);

  int64_t sent() const { return sent_; }
  int64_t received() const { return received_; }
  int64_t lent() const { return lent_bytes_; }

 private:
  struct Header;
  struct Message;
  struct Mailbox {
    std::deque<tensorflow::Tensor> arrived;
    std::deque<std::pair<int64_t, Transport::Arrival>> waiting;
  };

  // Of the writing side; `write_mutex_` is held.
  absl::Status Post(Message message);
  absl::Status WriteSome(Message* message, int flags);
  void WriteAll();

  // Of the reading thread.
  void ReadAll();
  absl::Status ReadOne();
  absl::Status ReadTensor(const Header& header);
  absl::Status CopyLent(const Header& header, void* target);
  absl::Status Reply(Message message);
  absl::Status TakeBack();
  absl::Status Read(void* target, size_t bytes);
  void Deliver(const std::string& tag, tensorflow::Tensor tensor);

  const int rank_;
  const int socket_;
  // The other process; 0 where it is on another host.
  const pid_t process_;
  std::atomic<int64_t> sent_{0}, received_{0}, lent_bytes_{0};

  std::mutex write_mutex_;
  std::condition_variable write_ready_, write_done_;
  std::deque<Message> outbox_;
  // In the order in which they were lent; they come back in it, too.
  std::deque<tensorflow::Tensor> lent_;
  bool can_lend_ = false;
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
