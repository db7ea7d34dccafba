#include "transport.h"

#include <chrono>
#include <vector>

#include "peer.h"

namespace tfdist {

using tensorflow::Tensor;

Transport& Transport::Get() {
  static Transport* transport = new Transport;
  return *transport;
}

void Transport::AddPeer(int rank, int socket) {
  auto peer = std::make_shared<Peer>(rank, socket);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    peers_[rank] = peer;
    peer->BeginRun(run_);
  }
  peer->Start();
}

void Transport::Close() {
  std::map<int, std::shared_ptr<Peer>> peers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    peers.swap(peers_);
  }
  for (auto& [rank, peer] : peers) peer->Close();
}

void Transport::BeginRun(int64_t run) {
  std::vector<std::shared_ptr<Peer>> peers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    run_ = run;
    for (auto& [rank, peer] : peers_) peers.push_back(peer);
  }
  for (auto& peer : peers) peer->BeginRun(run);
}

absl::Status Transport::Send(int rank, const Call& call, const Tensor& tensor) {
  auto peer = Find(rank);
  if (peer == nullptr) return Gone(rank, "there never was one");
  return peer->Send(call, tensor);
}

int64_t Transport::Receive(int rank, const Call& call, Arrival arrival) {
  auto peer = Find(rank);
  if (peer == nullptr) {
    arrival(Gone(rank, "there never was one"), Tensor());
    return 0;
  }
  return peer->Receive(call, std::move(arrival));
}

void Transport::Abandon(int rank, const std::string& tag, int64_t number) {
  if (auto peer = Find(rank)) peer->Abandon(tag, number);
}

bool Transport::Flush(double seconds) {
  const auto until = std::chrono::steady_clock::now() +
                     std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                         std::chrono::duration<double>(seconds));
  std::vector<std::shared_ptr<Peer>> peers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [rank, peer] : peers_) peers.push_back(peer);
  }
  bool flushed = true;
  for (auto& peer : peers) flushed = peer->Flush(until) && flushed;
  return flushed;
}

Transport::Traffic Transport::Count() {
  std::lock_guard<std::mutex> lock(mutex_);
  Traffic total;
  for (auto& [rank, peer] : peers_) {
    total.sent += peer->sent();
    total.received += peer->received();
  }
  return total;
}

std::shared_ptr<Peer> Transport::Find(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = peers_.find(rank);
  return found == peers_.end() ? nullptr : found->second;
}

}  // namespace tfdist
