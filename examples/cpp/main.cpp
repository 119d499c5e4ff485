// A package in a process without Python: torch's own loader opens it.
//
//   g++ -std=c++17 main.cpp -o run -I$TORCH/include \
//       -L$TORCH/lib -ltorch -ltorch_cpu -lc10 -Wl,-rpath,$TORCH/lib
//   ./run model.pt2 input.bin 2,8 output.bin
//
// The input is a file of floats, of the sizes that follow it; the first output is written as one.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <vector>

static std::vector<int64_t> sizes_of(const std::string& text) {
  std::vector<int64_t> sizes;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) sizes.push_back(std::stoll(part));
  return sizes;
}

int main(int count, char** words) {
  if (count != 5) {
    std::cerr << "usage: run PACKAGE INPUT SIZES OUTPUT\n";
    return 2;
  }
  try {
    c10::NoGradGuard no_grad;
    at::Tensor input = at::empty(sizes_of(words[3]));
    std::ifstream(words[2], std::ios::binary)
        .read(static_cast<char*>(input.data_ptr()), input.nbytes());
    torch::inductor::AOTIModelPackageLoader model(words[1]);
    at::Tensor output = model.run({input}).at(0).contiguous();
    std::ofstream(words[4], std::ios::binary)
        .write(static_cast<const char*>(output.data_ptr()), output.nbytes());
    std::cout << output.sizes() << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
